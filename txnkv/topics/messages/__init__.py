"""Messages: as a sender gives them, as a batch takes them, as a reader holds them.

message_input   checked at the call, made into Arrow at the flush, each for a partition
message         one message of a reader; batches, with large ones in pieces, and back
values          values that are rows of declared columns
"""

from txnkv.topics.messages import message_input, values
from txnkv.topics.messages.message import (
    DELIVER_AT,
    Message,
    MessageId,
    Reassembly,
    cut_messages,
    cut_runs,
    fit_batch,
    messages_from_arrow,
    messages_of,
    messages_to_arrow,
    topic_number,
)
from txnkv.topics.messages.message_input import (
    TIME,
    Outgoing,
    Pending,
    Plain,
    Sticky,
    as_arrow,
    key_hash,
    now_micros,
    outgoing,
    pending,
    spread,
)
from txnkv.topics.messages.values import Encoded, ValueCodec, ValueStage, value_codec
