"""Who is in a consumer group now, as Kafka's coordinator says: a killed member leaves when its session runs out."""

from aiokafka.errors import KafkaError, for_code

from infra.kafka import clients
from infra.settings import KafkaSettings

# A question's deadline.
ANSWER_S = 2.0


class GroupMembers:
    """Asks by group name. A member is known by the client id of its consumer.

    While a group rebalances it keeps its members: one that does not come back leaves when its session ran out, or
    when the rebalance does.
    """

    def __init__(self, settings: KafkaSettings) -> None:
        self._admin = clients.make_admin(settings)
        self._coordinators: dict[str, int] = {}

    async def start(self) -> None:
        await clients.start(self._admin)

    async def stop(self) -> None:
        await clients.stop(self._admin)

    async def of(self, group: str) -> frozenset[str]:
        """The client ids of a group's members; none where there is no such group. Raises KafkaError, KafkaTimeout."""
        try:
            return await clients.within(ANSWER_S, f"asking who is in {group}", self._ask(group))
        except (KafkaError, clients.KafkaTimeout):
            # It may have moved to another broker.
            self._coordinators.pop(group, None)
            raise

    async def _ask(self, group: str) -> frozenset[str]:
        if group not in self._coordinators:
            self._coordinators[group] = await self._admin.find_coordinator(group)
        # One group at a time: aiokafka 0.14 reads an answer about several by the layout of an older version.
        (answer,) = await self._admin.describe_consumer_groups([group], self._coordinators[group])
        (found,) = answer.to_object()["groups"]
        if found["error_code"]:
            raise for_code(found["error_code"])(group)
        return frozenset(member["client_id"] for member in found["members"])
