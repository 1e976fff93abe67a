"""Messages: values, batches, the choice of a partition, large ones cut and put together."""

from txnkv.topics.messages import chunking, message_batches, message_input, values
from txnkv.topics.messages.message import Message, MessageId, TypedMessage, messages_of
from txnkv.topics.messages.message_input import (
    TIME,
    Outgoing,
    Pending,
    Single,
    as_arrow,
    now_micros,
    outgoing,
    pending,
)
from txnkv.topics.messages.partitioner import Sticky, partition_of_one, spread
from txnkv.topics.messages.reassembly import Reassembly
from txnkv.topics.messages.values import Encoded, ValueCodec, value_codec

__all__ = [
    "Encoded",
    "Message",
    "MessageId",
    "Outgoing",
    "Pending",
    "Reassembly",
    "Single",
    "Sticky",
    "TIME",
    "TypedMessage",
    "ValueCodec",
    "as_arrow",
    "chunking",
    "message_batches",
    "message_input",
    "messages_of",
    "now_micros",
    "outgoing",
    "partition_of_one",
    "pending",
    "spread",
    "value_codec",
    "values",
]
