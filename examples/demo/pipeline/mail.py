"""Mail each alert, and note it: the note and the acknowledgement are one transaction.

Printing stands for mailing. It is done before the commit, so after a kill in between a line may
be printed again, as with any mail that the world outside has seen. The table has it once.

python -m examples.demo.pipeline.mail STORE
"""

from __future__ import annotations

import argparse
import sys

import txnkv
from examples.demo.pipeline import layout


def mail(client: txnkv.Client, subscription: txnkv.Subscription) -> None:
    """Mail what is there; wait for it a second."""
    alerts = subscription.receive_many(timeout=1.0)
    if not alerts:
        return

    def note(txn: txnkv.Transaction) -> None:
        for alert in alerts:
            word, total = str(alert.key or b"", "utf-8"), int(alert.value)
            print(f"To: editors. {word!r} was written {total:,} times", flush=True)
            txn.insert(layout.MAILS, {"word": word, "total": total})
        txn.ack(subscription, alerts)

    client.run(note)


def main() -> None:
    parser = argparse.ArgumentParser(description="Mail each alert.")
    parser.add_argument("store")
    given = parser.parse_args()
    with txnkv.connect(given.store) as client:
        layout.make(client)
        with client.topic(layout.ALERTS).subscribe(layout.MAILER) as subscription:
            while True:
                mail(client, subscription)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(0)
