"""A node of the cluster: it owns buckets, stores their rows and answers for them.

    python node.py --addr 127.0.0.1:7701 --seeds 127.0.0.1:7701,127.0.0.1:7702

It needs no path: those who put and read say which queues there are. SIGTERM and Ctrl-C end it, and
its buckets go to the other nodes at once.
"""

from __future__ import annotations

import asyncio
import signal

from settings import parser

from persisting_torch import cluster


async def main() -> None:
    options = parser(__doc__).parse_args()
    end = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, end.set)
    await cluster.init(options.addr, options.seeds.split(","), name=options.addr)
    print(f"node {options.addr} is there", flush=True)
    await end.wait()
    await cluster.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
