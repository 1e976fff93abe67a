"""Writing by Spark: jobs whose accepted attempts count (`job_writer`), into `targets`."""

from txnkv.spark.writing.job_writer import JobWriter, begin_own
from txnkv.spark.writing.targets import (
    ChangesTarget,
    TableTarget,
    Target,
    TopicTarget,
    Written,
    attempt_of_task,
    one_each,
    stage,
)
