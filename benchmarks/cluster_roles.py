"""The other processes of benchmarks/cluster.py: `python cluster_roles.py ROLE [SEED]`.

Each prints where it listens once it does.

node     owns buckets
pulsing  an actor that keeps what it is given and sends it, as whoever uses Pulsing alone has it
hastened the same where Pulsing's sockets send at once, which we see to
flight   a plain Arrow Flight server that keeps in memory what it is given, and sends it
lance    one that appends what it is given to a Lance dataset; the folder stands for the seed
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import lance
import pyarrow as pa
import pyarrow.flight as flight

from persisting_torch import cluster

HOLDERS = {"pulsing": "benchmark/pulsing", "hastened": "benchmark/hastened"}
ANYWHERE = "127.0.0.1:0"


async def node(seeds: list[str]) -> None:
    await cluster.init(ANYWHERE, seeds=seeds)
    from pulsing import get_system
    from pulsing.streaming import get_storage_manager

    await get_storage_manager(get_system())  # for Pulsing's own queue, which is compared
    await _forever()


async def holder(role: str, seeds: list[str]) -> None:
    import pulsing

    if role == "pulsing":
        await pulsing.init(ANYWHERE, seeds=seeds)
    else:
        await cluster.init(ANYWHERE, seeds=seeds, owns_buckets=False)

    class Holder(pulsing.Actor):  # type: ignore[misc,name-defined]
        kept: Any = None

        async def receive(self, message: Any) -> Any:
            if message[0] == "put":
                self.kept = message[1]
                return ("ok", len(self.kept))
            return ("ok", self.kept)

    await pulsing.get_system().spawn(Holder(), name=HOLDERS[role], public=True)
    await _forever()


async def _forever() -> None:
    from pulsing import get_system

    print(get_system().addr, flush=True)
    while True:
        await asyncio.sleep(3600)


class Memory(flight.FlightServerBase):
    """One table, put and got; in messages of about a megabyte, which is fastest."""

    def __init__(self) -> None:
        super().__init__(f"grpc://{ANYWHERE}")
        self.table = pa.table({})

    def do_put(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        self.table = reader.read_all()

    def do_get(self, context: Any, ticket: Any) -> Any:
        return flight.RecordBatchStream(self.table)


class Appends(flight.FlightServerBase):
    """Appends what is put to a Lance dataset, as plainly as can be."""

    def __init__(self, folder: str) -> None:
        super().__init__(f"grpc://{ANYWHERE}")
        self.path = f"{folder}/plain-{self.port}.lance"

    def do_put(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        given = reader.read_all()
        # Copied, since Lance does not take buffers at odd addresses, where Flight may put them.
        columns = [pa.concat_arrays(column.chunks) for column in given.columns]
        table = pa.Table.from_arrays(columns, schema=given.schema)
        lance.write_dataset(table, self.path, mode="append")


def main(role: str, *seeds: str) -> None:
    if role in ("flight", "lance"):
        server = Memory() if role == "flight" else Appends(*seeds)
        print(f"127.0.0.1:{server.port}", flush=True)
        server.serve()
    else:
        asyncio.run(node(list(seeds)) if role == "node" else holder(role, list(seeds)))


if __name__ == "__main__":
    main(*sys.argv[1:])
