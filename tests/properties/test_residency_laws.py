"""The laws of residency, for any slots, owners, weights, floors and use."""

from hypothesis import given, settings
from hypothesis import strategies as st

from consumers.worker.residency import Owner, Resident, Slots, choose
from schemas.audit import EvictReason

OWNERS = ["", "acme", "globex", "initech", "hooli"]
owners = st.sampled_from(OWNERS)
residents = st.lists(
    st.builds(
        lambda owner, score, idle: (owner, score, idle), owners, st.floats(0, 100), st.booleans()
    ),
    min_size=1,
    max_size=8,
)  # fmt: skip
workings = st.dictionaries(owners, st.builds(Owner, weight=st.integers(1, 1000), floor=st.integers(0, 4)), max_size=5)


@given(newcomer=owners, raw=residents, working=workings, data=st.data())
@settings(max_examples=1000)
def test_whoever_leaves_was_free_and_above_what_is_its_owners(
    newcomer: str, raw: list[tuple[str, float, bool]], working: dict[str, Owner], data: st.DataObject
) -> None:
    held = [Resident(digest=f"d{n}", owner=o, score=s, idle=i) for n, (o, s, i) in enumerate(raw)]
    free = set(data.draw(st.lists(st.sampled_from([r.digest for r in held]), unique=True)))
    working = {**working, newcomer: working.get(newcomer, Owner())}
    slots = Slots(count=len(held), residents=held, working=working)
    floors = data.draw(st.dictionaries(owners, st.integers(0, 4)))
    choice = choose(newcomer, slots, free, floors)
    assert choice == choose(newcomer, slots, free, floors)
    if choice is None:
        return
    assert choice.digest in free
    owner = next(r.owner for r in held if r.digest == choice.digest)
    own = choice.reason in (EvictReason.IDLE, EvictReason.OWN_SHARE)
    assert own == (owner == newcomer)
    if own:
        return
    floor = working[owner].floor if owner in working else floors.get(owner, 0)
    assert slots.held[owner] - 1 >= floor
    if choice.reason is EvictReason.RECLAIM_BORROWED:
        assert slots.held[owner] - 1 >= slots.share(owner)
    else:
        assert choice.reason is EvictReason.TURN
        assert slots.held[newcomer] < slots.share(newcomer)


@given(raw=residents, working=workings)
@settings(max_examples=300)
def test_an_owner_below_its_share_is_served_while_anything_free_is_borrowed(
    raw: list[tuple[str, float, bool]], working: dict[str, Owner]
) -> None:
    held = [Resident(digest=f"d{n}", owner=o, score=s, idle=i) for n, (o, s, i) in enumerate(raw) if o != "acme"]
    working = {**working, "acme": Owner()}
    slots = Slots(count=max(1, len(held)), residents=held, working=working)
    borrowed = [
        r for r in held
        if slots.held[r.owner] - 1 >= slots.share(r.owner)
        and slots.held[r.owner] > (working[r.owner].floor if r.owner in working else 0)
    ]  # fmt: skip
    choice = choose("acme", slots, {r.digest for r in held})
    assert not borrowed or choice is not None
