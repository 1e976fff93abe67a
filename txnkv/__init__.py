"""txnkv: exactly-once tables and topics, embedded in a Python process.

One transaction over both:

    client = txnkv.connect("data/shop")
    orders = client.create_table(
        "orders", txnkv.Schema({"id": "int64", "total": "float64?"}, primary_key=["id"])
    )
    events = client.create_topic("events")
    with client.transaction() as txn:
        txn.insert(orders, {"id": 1, "total": 9.5})
        txn.send(events, b"order 1")

Names are loaded when the first of them is used, and modules (`txnkv.aio`, `txnkv.spark`) when
they are: `txnkv --version`, and a program that imports txnkv and may not use it, wait for none.
"""

TYPE_CHECKING = False  # a module less than typing's; type checkers know it by its name

__version__ = "0.1.0"  # which setuptools reads from here as well

if TYPE_CHECKING:
    from txnkv import aio as aio
    from txnkv.api import *  # noqa: F403
else:

    def __getattr__(name):
        from importlib import import_module
        from importlib.util import find_spec

        if name == "__all__" or not name.startswith("_"):
            # Modules first: those being loaded get each other by `from txnkv import ...`.
            if find_spec(f"{__name__}.{name}") is not None:
                return import_module(f"{__name__}.{name}")
            api = import_module("txnkv.api")
            names = {each: vars(api)[each] for each in vars(api) if not each.startswith("_")}
            globals().update(names, __all__=[*names, "aio"])
            if name in globals():
                return globals()[name]
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__():
        return sorted({*globals(), *__getattr__("__all__")})
