"""The same client for asyncio, on threads of the library's own.

    async with txnkv.aio.connect("data/shop") as client:
        orders = await client.table("orders")
        async with client.transaction() as txn:
            await txn.insert(orders, {"id": 1, "total": 9.5})

What may wait is a coroutine, and does what its namesake of the blocking client does. No call
blocks the event loop. A handle that a call makes is awaited, or entered at once, as
`async with client.snapshot() as now:`. A scan is given at once, and may be awaited as well: its
methods are awaited, as in `await txn.scan(orders).to_arrow()`, and rows come by `async for`.

**Cancelled**, a call that has begun goes on to its end on its thread, and the next call of the
same transaction or session comes after it. So a commit that is cancelled is wholly done or not at
all, and `await txn.state()` or `client.transaction_state(id)` tells which; a transaction block
that is cancelled inside has rolled back when it is left. Of a call that has not begun nothing
happens.

**Without a twin** are the `open` of tokens of a scan or diff, which takes a blocking client:
`await asyncio.to_thread(token.open, client)` with one of `txnkv.connect`; and `commit_async`, for
which `asyncio.create_task(txn.commit())` is there.

`async_client` has the client, `async_handles` what it gives out; `calls` runs a blocking call on
a thread, and makes the twin of a method.
"""

from txnkv.aio.async_client import AsyncClient as AsyncClient
from txnkv.aio.async_client import connect as connect
from txnkv.aio.async_handles import AsyncConsumer as AsyncConsumer
from txnkv.aio.async_handles import AsyncGroupConsumer as AsyncGroupConsumer
from txnkv.aio.async_handles import AsyncProducer as AsyncProducer
from txnkv.aio.async_handles import AsyncScan as AsyncScan
from txnkv.aio.async_handles import AsyncSession as AsyncSession
from txnkv.aio.async_handles import AsyncSnapshot as AsyncSnapshot
from txnkv.aio.async_handles import AsyncSubscription as AsyncSubscription
from txnkv.aio.async_handles import AsyncTable as AsyncTable
from txnkv.aio.async_handles import AsyncTopic as AsyncTopic
from txnkv.aio.async_handles import AsyncTransaction as AsyncTransaction
