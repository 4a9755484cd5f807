"""A process that owns buckets: takes them when they are asked for, serves them, keeps them."""

from __future__ import annotations

import itertools
import logging
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict
from functools import partial
from typing import Any

import pyarrow as pa

from persisting_torch.cluster.finder import Member
from persisting_torch.cluster.keeping import Answer, Held, Keeping, Key, OpenService
from persisting_torch.cluster.making import Making, Told
from persisting_torch.cluster.moving import Mover, owner_seen
from persisting_torch.cluster.plane import Peer, Server, waiting
from persisting_torch.cluster.secret import Credentials
from persisting_torch.cluster.trouble import Elsewhere
from persisting_torch.cluster.wire import Message
from persisting_torch.errors import BucketUnavailable, PersistingError, QueueClosed, StaleOwner
from persisting_torch.queue.objects import is_url
from persisting_torch.queue.ownership import BEAT_SECONDS, Ownership, read_owner
from persisting_torch.queue.place import Place, Split, found_at, open_place
from persisting_torch.queue.threads import Background, at_once

log = logging.getLogger(__name__)

OPENING_SECONDS = 1.0  # for which whoever asks for an owner waits; then it asks again
END_SECONDS = 5.0
CLOSED_AT_ONCE = 16
KNOWS_SECONDS = 0.5
SETTLE_SECONDS = 2.0


def _aside(remote: bool) -> AbstractContextManager[None]:
    """Who mostly waits for an object store does not keep others from being answered."""
    return waiting() if remote else nullcontext()


class Node:
    """Owns buckets, and answers for them through a Flight server.

    Every answer is given only if the bucket was this node's beyond doubt both when the request came
    and when the answer was ready.
    """

    def __init__(
        self, name: str, host: str, credentials: Credentials | None, open_service: OpenService
    ) -> None:
        self.name = name
        self.incarnation = uuid.uuid4().hex
        self.discover: Callable[[], Sequence[Member]] = list
        self._credentials = credentials
        self._open_service = open_service
        self._kept: dict[Key, Keeping] = {}
        self._lock = threading.Lock()
        self._closing = False
        self._end = threading.Lock()
        self._end.acquire()
        self.server = Server(host, self.answer, credentials)
        self._mover = Mover(self, credentials)
        self._making = Making(name)
        self._keeper = Background(self._keep)

    @property
    def member(self) -> Member:
        return Member(self.name, self.server.address)

    # Answering

    def answer(self, request: Message, table: pa.Table | None) -> Answer:
        """The answer to a request. Raises StaleOwner for a bucket that is not this node's."""
        header = request.header
        if header["op"] == "nodes":
            nodes = [[node.name, node.address, node.doubtful] for node in self.discover()]
            return Message({"nodes": nodes}), None
        key = Key(header["queue"], header["storage_path"], int(header["bucket"]))
        if header["op"] == "knows":
            making = self._making.is_at(key)  # first: it may be there before the next line
            known = found_at(key.queue, key.storage_path) is not None
            return Message({"known": known, "making": making}), None
        if header["op"] == "sees":
            if self._closing:
                raise BucketUnavailable(f"{self.name} is closing.")
            return Message({"incarnation": owner_seen(key, header.get("storage_options"))}), None
        if header["op"] == "where":
            with _aside(is_url(key.storage_path)):
                return self._where(key, header.get("split"), header.get("storage_options")), None
        kept = self._kept.get(key)
        held = kept and kept.held
        service = held and held.service
        if not kept or not held or not service:
            raise StaleOwner(f"{key} is not owned by {self.name}.")
        with _aside(kept.is_remote):
            held.ownership.check()
            try:
                alive = header["op"] == "alive"
                answer = (Message({}), None) if alive else service.answer(request, table)
            except QueueClosed as error:
                raise StaleOwner(f"{self.name} has let go of {key}.") from error
            except Exception:
                held.ownership.check()  # that something is not there, or full, is an answer, too
                raise
            held.ownership.check()
            return answer

    def _where(self, key: Key, split: list[Any] | None, options: dict[str, str] | None) -> Message:
        """The owner of a bucket; this node, if there is none or it is dead."""
        kept = self._keeping(key, split, options)
        with kept.lock:
            if (
                kept.held is None
                and kept.opening is None
                and time.monotonic() > kept.trouble.not_before
            ):
                dead = kept.watch.dead()
                if dead is not None and not self._closing:
                    after = dead.epoch
                    kept.opening = Background(lambda: self._take(key, kept, after))
            opening = kept.opening
        if opening is not None:
            with waiting():
                opening.join(OPENING_SECONDS)
        held = kept.held
        if held is not None and held.service is not None:
            held.ownership.check()
            return Message(asdict(held.ownership.owner))
        owner = read_owner(kept.folder, kept.files)
        if owner is None or owner.incarnation in ("", self.incarnation):
            return Message({"why": kept.trouble.text or f"{self.name} is not ready to own {key}."})
        if not owner.address:
            return Message(
                {
                    "why": f"{key} is open as a local queue in process {owner.node}, so a"
                    " cluster cannot own it. Close it there."
                }
            )
        return Message(asdict(owner))

    def _keeping(
        self, key: Key, split: list[Any] | None, options: dict[str, str] | None
    ) -> Keeping:
        kept = self._kept.get(key)
        if kept is None:
            place, is_part = self._place(key, split, options)
            # All buckets are watched once one is asked for: those that die with it are then
            # replaced as soon as it is.
            with self._lock:
                for number in range(int(is_part), place.num_buckets):
                    keeping = Keeping(place.of_bucket(number).bucket, place.files)
                    self._kept.setdefault(key._replace(bucket=number), keeping)
                kept = self._kept[key]
        elif kept.is_remote and not kept.held and options and options != kept.files.options:
            kept.reach(self._place(key, split, options)[0].files)
        if kept.is_remote:
            self._note_question(key)
        return kept

    def _note_question(self, key: Key) -> None:
        """Watch all buckets of the queue for a while: somebody misses an owner."""
        for number in itertools.count():
            kept = self._kept.get(key._replace(bucket=number))
            if kept is None:
                return
            kept.asked = time.monotonic()

    def _place(
        self, key: Key, split: list[Any] | None, options: dict[str, str] | None
    ) -> tuple[Place, bool]:
        """The queue on this node's storage, made if need be; whether that is only a part of it.

        Nodes may have storage of their own. Where the queue was made its first bucket is, and
        nowhere else; of the others each is on the storage of the node that had it first.
        """
        if is_url(key.storage_path):  # which all nodes see alike
            asked = split and Split(split[0], split[1], distributed=True)
            return open_place(key.queue, key.storage_path, asked or None, options), False
        found = found_at(key.queue, key.storage_path)
        is_part = found.get("part", False) if found else key.bucket > 0
        if key.bucket == 0 and is_part:
            raise BucketUnavailable(f"{key} lies on storage that {self.name} does not see.")
        asked = split and Split(split[0], split[1], distributed=True, part=is_part)
        anew = key.bucket == 0 and not found
        with self._making.alone(key, lambda: self._told(key)) if anew else nullcontext():
            return open_place(key.queue, key.storage_path, asked or None), is_part

    def _told(self, key: Key) -> list[Told]:
        """What the other nodes that answer say of a queue: whether they have it, or make it."""
        found: list[Told] = []
        request = Message({"op": "knows", **key._asdict()})

        def ask(node: Member) -> None:
            peer = Peer(node.address, self._credentials)
            try:
                said = peer.ask(request, KNOWS_SECONDS).header
                found.append(Told(node.name, said["known"], said["making"]))
            except BucketUnavailable:
                return  # a dead node cannot tell
            finally:
                peer.close()

        others = [node for node in self.discover() if node.address != self.server.address]
        with waiting():
            at_once([partial(ask, node) for node in others])
        return found

    def _take(self, key: Key, kept: Keeping, after: int) -> None:
        """Become the owner of a bucket, and open it."""
        ownership: Ownership | None = None
        try:
            ownership = Ownership.take(
                kept.folder, after, self.incarnation, self.name, self.server.address, kept.files
            )
            if ownership is not None:
                # It beats from now on, however long opening takes.
                held = kept.held = Held(ownership)
                held.service = self._open_service(key, ownership)
                log.info("%s owns %s now", self.name, key)
                kept.trouble.end()
        except Exception as error:  # told to those who ask for the owner
            text = f"{self.name} could not open {key}: {error}"
            if kept.trouble.note(text, lasting=isinstance(error, Elsewhere)):
                log.warning("%s", text, exc_info=not isinstance(error, PersistingError))
            if ownership is not None:
                kept.held = None
                with suppress(OSError):  # else others find out by themselves, in some seconds
                    ownership.give_up()
        finally:
            with kept.lock:
                kept.opening = None

    def options_for(self, key: Key) -> dict[str, str] | None:
        """How this node reaches the store of a bucket that it keeps."""
        return self._kept[key].files.options

    # Keeping

    def _keep(self) -> None:
        """Say every second that this node lives, and watch those that it may have to replace."""
        while not self._end.acquire(timeout=BEAT_SECONDS / 2):
            for key, kept in list(self._kept.items()):
                if not kept.is_remote:
                    self._look_after(key, kept)
                elif kept.is_due():
                    # A store that does not answer holds up nothing but its own bucket.
                    kept.look = Background(partial(self._look_after, key, kept))
            self._mover.look()

    def _look_after(self, key: Key, kept: Keeping) -> None:
        held = kept.held
        try:
            if held is not None:
                held.ownership.beat()
            else:
                with kept.lock:
                    kept.watch.dead()
            kept.failing = False
        except StaleOwner as error:
            if held is not None and not held.ownership.given_up:
                log.warning("%s", error)
                self._drop(kept, held)
        except (OSError, PersistingError) as error:
            if not kept.failing:
                log.warning("%s: %s", key, error)
            kept.failing = True

    @staticmethod
    def _drop(kept: Keeping, held: Held | None) -> None:
        """Stop serving a bucket that another node has taken over."""
        with kept.lock:
            if held is None or kept.held is not held or kept.opening is not None:
                return
            kept.held = None
        if held.service is not None:
            Background(held.service.abandon)

    def close(self) -> None:
        """Close the buckets and leave them to other nodes at once.

        Raises what kept a bucket from being closed, after all the others.
        """
        if self._closing:
            return
        self._closing = True
        self._mover.end(END_SECONDS)
        troubles: list[BaseException] = []

        def end(key: Key) -> None:
            for step in (self._settle, self._leave):
                try:
                    step(self._kept[key])
                except Exception as error:
                    troubles.append(error)

        # The ledgers last: the other buckets of a queue may still have something to enter there.
        # Several at a time, so that storage that hangs does so for all of them at once.
        for ledgers in (False, True):
            keys = [key for key in self._kept if (key.bucket == 0) is ledgers]
            for first in range(0, len(keys), CLOSED_AT_ONCE):
                at_once([partial(end, key) for key in keys[first : first + CLOSED_AT_ONCE]])
        self._end.release()
        self._keeper.join(END_SECONDS)
        for kept in self._kept.values():
            if kept.look is not None:
                kept.look.join(END_SECONDS)
        self.server.close()
        if troubles:
            raise troubles[0]

    @staticmethod
    def _settle(kept: Keeping, *, anyway: bool = True) -> bool:
        """Let what is under way in a bucket end; False if it is to stay as it is for now."""
        with kept.lock:
            opening = kept.opening
        if opening is not None:
            opening.join(END_SECONDS)
        held = kept.held
        if held is None or held.service is None:
            return False
        return held.service.settle(SETTLE_SECONDS, anyway=anyway)

    @staticmethod
    def _leave(kept: Keeping, away: float = 0.0) -> None:
        """Close a bucket and give it up; it is not taken back for `away` seconds."""
        held = kept.held
        if held is not None:
            service, held.service = held.service, None
            try:
                if service is not None:
                    service.close()
            finally:
                kept.trouble.not_before = time.monotonic() + away
                held.ownership.give_up()
                with kept.lock:
                    kept.held = None if kept.held is held else kept.held

    # Handing over

    def owned(self) -> list[Key]:
        """The buckets that this node owns and answers for."""
        kept = list(self._kept.items())
        return sorted(key for key, one in kept if one.held is not None and one.held.service)

    def give_up(self, key: Key, away: float) -> bool:
        """Leave a bucket to another node, and do not take it back for `away` seconds.

        False if somebody has its queue alone, and it stays.
        """
        kept, settled = self._kept[key], True
        try:
            settled = self._settle(kept, anyway=False)
        finally:
            if settled:  # also with an error, after which it serves nobody any more
                self._leave(kept, away)
        return settled

    def want_again(self, key: Key) -> None:
        """Take a bucket that was given up, if anybody asks for it."""
        self._kept[key].trouble.not_before = 0.0

    def is_free(self, key: Key) -> bool:
        """Whether a bucket was given up, and nobody has taken it since."""
        dead = self._kept[key].watch.dead()
        return dead is not None and not dead.incarnation
