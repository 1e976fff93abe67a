import java.time.Duration;
import java.util.List;
import java.util.Map;
import java.util.Properties;
import java.util.Random;
import java.util.Set;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.ConsumerRecords;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.consumer.OffsetAndMetadata;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.KafkaException;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.errors.AuthorizationException;
import org.apache.kafka.common.errors.OutOfOrderSequenceException;
import org.apache.kafka.common.errors.ProducerFencedException;
import org.apache.kafka.common.errors.TimeoutException;

/** The program of copying.py with the Java client: java Copying SERVERS COUNT. */
public class Copying {
    static final TopicPartition IN = new TopicPartition("in", 0);
    static final long BEGAN = System.nanoTime();
    static final Random CHANCE = new Random();

    final KafkaConsumer<byte[], byte[]> consumer;
    final KafkaProducer<byte[], byte[]> producer;
    long at;

    Copying(String servers) {
        Properties asked = new Properties();
        asked.put("bootstrap.servers", servers);
        asked.put("reconnect.backoff.max.ms", "200");
        asked.put("enable.metrics.push", "false");
        asked.put("group.id", "copiers");
        asked.put("enable.auto.commit", "false");
        asked.put("isolation.level", "read_committed");
        asked.put("auto.offset.reset", "earliest");
        asked.put("max.poll.records", "20");
        asked.put("transactional.id", "copier");
        for (String side : new String[] {"key", "value"}) {
            String name = "org.apache.kafka.common.serialization.ByteArray";
            asked.put(side + ".serializer", name + "Serializer");
            asked.put(side + ".deserializer", name + "Deserializer");
        }
        consumer = new KafkaConsumer<>(asked);
        producer = new KafkaProducer<>(asked);
        producer.initTransactions();
        rewind();
    }

    void rewind() {
        OffsetAndMetadata found = consumer.committed(Set.of(IN)).get(IN);
        at = found == null ? 0 : found.offset();
        consumer.assign(List.of(IN));
        consumer.seek(IN, at);
    }

    void copy() {
        ConsumerRecords<byte[], byte[]> found = consumer.poll(Duration.ofSeconds(1));
        if (found.isEmpty()) return;
        producer.beginTransaction();
        long next = at;
        for (ConsumerRecord<byte[], byte[]> each : found) {
            producer.send(new ProducerRecord<>("out", 0, null, each.value()));
            if (CHANCE.nextInt(5) == 0) producer.flush();
            next = each.offset() + 1;
        }
        producer.sendOffsetsToTransaction(
            Map.of(IN, new OffsetAndMetadata(next)), consumer.groupMetadata());
        producer.commitTransaction();
        at = next;
    }

    void close() {
        producer.close(Duration.ZERO);
        consumer.close();
    }

    static void tell(String what) {
        System.out.printf("%.1f %s%n", (System.nanoTime() - BEGAN) / 1e9, what);
    }

    public static void main(String[] given) {
        long count = Long.parseLong(given[1]);
        Copying copier = new Copying(given[0]);
        while (copier.at < count) {
            boolean again = false;
            try {
                copier.copy();
                tell("at " + copier.at);
                continue;
            } catch (ProducerFencedException | OutOfOrderSequenceException
                     | AuthorizationException | TimeoutException error) {
                tell(error.toString());
                again = true;
            } catch (KafkaException error) {
                tell(error.toString());
            }
            try {
                if (!again) {
                    copier.producer.abortTransaction();
                    copier.rewind();
                    continue;
                }
            } catch (KafkaException error) {
                tell("abort: " + error);
            }
            copier.close();
            copier = new Copying(given[0]);
        }
        copier.close();
        tell("done");
    }
}
