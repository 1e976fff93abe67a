"""The loss of a damaged part, accepted."""

from __future__ import annotations

from txnkv.coordinator import Loss
from txnkv.errors import TableNotFoundError, TopicNotFoundError
from txnkv.instance import Instance
from txnkv.tables import accept_loss as accept_tablet
from txnkv.topics import accept_loss as accept_log


def accept_loss(instance: Instance, part: str, *, really: bool) -> Loss:
    """Give up what a tablet or partition has lost; see `Client.accept_loss`."""
    kind, name, number = _part(part)
    table = instance.engine.find(name) if kind != "topic" else None
    topic = instance.topics.find(name) if kind != "table" else None
    if table is not None and topic is not None:
        raise ValueError(f"{part!r} is a table and a topic: say table:{part} or topic:{part}")
    if topic is not None and number < len(topic.partitions):
        partition = instance.topics.partitions(topic)[number]
        loss = accept_log(instance.topics, partition, really=really)
    elif table is not None and number < len(table.tablets):
        tablet = instance.engine.tablets(table)[number]
        return accept_tablet(instance.engine, tablet, really=really)
    elif topic is not None or kind == "topic":
        raise TopicNotFoundError(f"no topic has the part {part!r}: see `txnkv check`")
    else:
        raise TableNotFoundError(f"no table or topic has the part {part!r}: see `txnkv check`")
    if really:
        instance.engine.flush()
    return loss


def _part(part: str) -> tuple[str, str, int]:
    """The kind, if it is said, the name and the number."""
    kind, colon, rest = part.partition(":")
    if not colon or kind not in ("table", "topic"):
        kind, rest = "", part
    name, _, number = rest.rpartition("/")
    if not name or not number.isdigit():
        raise ValueError(f"{part!r} is no part: say a name and a number, as in 'orders/0'")
    return kind, name, int(number)
