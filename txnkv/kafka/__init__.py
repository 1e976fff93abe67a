"""A store to Kafka's clients: one broker, beside the server of `txnkv.server`.

listener         connections, requests and their answers
broker           the store as a broker
log_requests     messages in and out
topic_requests   topics, their options, log-in
record_batches   batches of producers
wire_codec, api_tables, answer_codes    the protocol
"""

from txnkv.kafka.listener import KafkaServer

__all__ = ["KafkaServer"]
