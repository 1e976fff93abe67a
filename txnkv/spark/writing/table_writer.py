"""A batch write into a table; see `job_writer`."""

from __future__ import annotations

from pyspark.sql.types import StructType

from txnkv.spark.settings import Settings
from txnkv.spark.writing.attempts import Written
from txnkv.spark.writing.job_writer import JobWriter
from txnkv.spark.writing.targets import TableTarget

__all__ = ["TxnkvWriter", "Written"]


class TxnkvWriter(JobWriter):
    """Writes a table."""

    @classmethod
    def start(cls, settings: Settings, schema: StructType) -> TxnkvWriter:
        """Check that the data fits, then begin the job; see `JobWriter.begin`."""
        target = TableTarget(settings.table, settings.operation, settings.overwrite)
        return cls.begin(settings, target, schema, token=settings.token, timeout=settings.timeout)
