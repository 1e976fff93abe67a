"""Messages: as a sender gives them, as a batch takes them, as a reader holds them.

message_input   checked at the call, made into Arrow at the flush, each for a partition
chunking        cut into batches, large ones into pieces; these put together again
message         one message of a reader
values          values that are rows of declared columns
"""

from txnkv.topics.messages import chunking, message_input, values
from txnkv.topics.messages.chunking import Reassembly
from txnkv.topics.messages.message import (
    DELIVER_AT,
    Message,
    MessageId,
    messages_from_arrow,
    messages_of,
    messages_to_arrow,
)
from txnkv.topics.messages.message_input import (
    TIME,
    Outgoing,
    Pending,
    Single,
    Sticky,
    as_arrow,
    key_hash,
    now_micros,
    outgoing,
    partition_of_one,
    pending,
    spread,
)
from txnkv.topics.messages.values import Encoded, ValueCodec, ValueStage, value_codec
