"""The figures of the real engine on this machine's processors, which Kafka shares with it."""

from infra.clock import SystemClock
from infra.launch.stack import Stack
from infra.settings import EngineSettings
from producers.release import platform, publish
from producers.release.desk import Desk, open_desk
from producers.release.platform import PoolShape
from producers.release.publish import Submission
from schemas.adapters import AdapterManifest
from schemas.tenants import TenantConfigured
from tests.bench.children import REPOSITORY, Say
from tests.bench.figures import Figure
from tests.bench.loads import Load
from tests.bench.pipeline import PLENTY, Setup, compare

POOL = "bench-real"
BASE_NAME = "smollm2-135m-instruct"
BASE = REPOSITORY / ".cache/base" / BASE_NAME
EXAMPLES = REPOSITORY / "examples/adapters"
ALIASES = (("acme", "support-en"), ("acme", "legal-en"), ("globex", "support-en"), ("globex", "haiku"))
CONTEXT_MAX = 512
RANK_MAX = 8
SHAPE = PoolShape(rank_max=RANK_MAX, context_max=CONTEXT_MAX, partitions=4)
ENGINE = EngineSettings(
    kind="vllm", base=BASE, slots=4, rows=8, rank_max=RANK_MAX, context_max=CONTEXT_MAX, kv_bytes=128 << 20
)


async def measure(stack: Stack, load: Load, say: Say) -> list[Figure]:
    async with open_desk(stack.file, SystemClock(), "bench") as desk:
        say(f"{POOL}: the base model and its adapters are made known")
        manifests = await _release(stack, desk)
    setup = Setup(pool=POOL, engine=ENGINE, aliases=ALIASES, manifests=manifests, load=load)
    compared = await compare(stack, setup, say)
    return [
        compared.added_ms("real_ttft_added_ms_p50", 0.5),
        *compared.throughput("real_throughput_ratio", "real_tokens_per_s"),
    ]


async def _release(stack: Stack, desk: Desk) -> list[AdapterManifest]:
    """As in a release, but for the gate: it would start one more engine to say what the demo has said."""
    await platform.add_base(desk, BASE, BASE_NAME)
    admin = stack.kafka("admin")
    await platform.set_pool(desk, admin, POOL, BASE_NAME, SHAPE)
    for tenant in sorted({tenant for tenant, _ in ALIASES}):
        limits = TenantConfigured(tenant=tenant, concurrency_max=PLENTY, configured_by=desk.actor)
        await platform.add_tenant(desk, stack.file, limits)
    manifests = []
    for tenant, alias in ALIASES:
        submission = Submission(directory=EXAMPLES / tenant / alias, tenant=tenant, alias=alias, base=BASE_NAME)
        manifests.append(await admitted(desk, submission))
    return manifests


async def admitted(desk: Desk, submission: Submission) -> AdapterManifest:
    """Submit an adapter, admit it untried and point its alias at it."""
    manifest = await publish.submit(desk, submission)
    await publish.admit(desk, manifest, None)
    assert submission.alias is not None
    await publish.point(desk, submission.tenant, submission.alias, manifest.digest)
    return manifest


def possible() -> bool:
    """Whether the base model was prepared."""
    return (BASE / "config.json").is_file()
