"""One owner at a time of each bucket, proven by files (or objects) in the bucket's folder.

    bucket-2/owner/7      made exclusively by the owner of epoch 7; the largest number is the owner

The file says who it is, and a count in it rises every second while the owner lives. Whoever has
watched the count stand still for `TAKEOVER_SECONDS`, or sees that the process is gone from this
machine, may make the file of the next epoch. An owner that has not been able to raise its count for
`TRUSTED_SECONDS`, by a clock that also runs while the machine sleeps, no longer believes in itself.
What such an owner still has under way is refused by the ledger, whose transactions begin with a
look at the epoch in force, and by Lance, since the new owner begins with a commit that older ones
conflict with.
"""

from __future__ import annotations

import json
import os
import threading
import time
import uuid
from dataclasses import asdict, dataclass, replace

from persisting_torch.errors import BucketUnavailable, FormatError, StaleOwner
from persisting_torch.queue.files import LOCAL, Files
from persisting_torch.queue.host import born, processes
from persisting_torch.queue.place import Place

BEAT_SECONDS = 1.0
TRUSTED_SECONDS = 3.0
TAKEOVER_SECONDS = 5.0
LOOK_SECONDS = 0.1
KEPT = 8

FOLDER = "owner"


@dataclass(frozen=True)
class Owner:
    """Who owns a bucket: the epoch, the process's name for itself, and its Flight server.

    And which process that is, for those who can see whether it lives.
    """

    epoch: int
    incarnation: str
    node: str
    address: str
    count: int = 0
    processes: str = ""
    pid: int = 0
    born: str = ""

    @property
    def is_dead(self) -> bool:
        """Whether this machine runs its processes, and runs it no more."""
        return self.processes == processes() and born(self.pid) != self.born


Folder = str | os.PathLike[str]


def read_owner(bucket: Folder, files: Files = LOCAL) -> Owner | None:
    """The owner that the folder names, alive or not; None if there was none yet."""
    while True:
        epoch = _largest(bucket, files)
        if epoch is None:
            return None
        file = _file(bucket, epoch)
        try:
            found = json.loads(files.read(file))
            return Owner(**{name: found[name] for name in Owner.__annotations__})
        except FileNotFoundError:
            continue  # removed, since there are later ones
        except (ValueError, KeyError, TypeError) as error:
            raise FormatError(
                f"{file} does not say who owns {bucket} ({error!r}). Remove it while no node runs."
            ) from error


class Ownership:
    """This process's ownership of one bucket."""

    def __init__(self, bucket: Folder, owner: Owner, began: float, files: Files = LOCAL) -> None:
        self.bucket = bucket
        self.owner = owner
        self.files = files
        self._lock = threading.Lock()
        self._beaten = began
        self._lost = False
        self.given_up = False

    @staticmethod
    def take(
        bucket: Folder,
        after: int,
        incarnation: str,
        node: str,
        address: str,
        files: Files = LOCAL,
    ) -> Ownership | None:
        """Become the owner of the epoch after this one; None if somebody else did."""
        began = _now()
        own = os.getpid()
        owner = Owner(after + 1, incarnation, node, address, 0, processes(), own, born(own))
        if not files.create(_file(bucket, owner.epoch), _content(owner)):
            return None
        if _largest(bucket, files) != owner.epoch:
            return None
        old = [epoch for epoch in _epochs(bucket, files) if epoch <= after - KEPT]
        files.remove([_file(bucket, epoch) for epoch in old])
        return Ownership(bucket, owner, began, files)

    def beat(self) -> None:
        """Say that the owner lives. Raises StaleOwner if it was replaced."""
        with self._lock:
            self._beat()

    def _beat(self) -> None:
        began = _now()
        if self._lost or _largest(self.bucket, self.files) != self.owner.epoch:
            self._lost = True
            raise self._stale()
        self._write(replace(self.owner, count=self.owner.count + 1))
        self._beaten = began

    def _write(self, owner: Owner) -> None:
        self.files.replace(_file(self.bucket, owner.epoch), _content(owner))
        self.owner = owner

    def check(self) -> None:
        """Raise StaleOwner unless this process may speak for the bucket at this moment.

        Raises BucketUnavailable where its files cannot be reached.
        """
        while self._lost or _now() - self._beaten > TRUSTED_SECONDS:
            try:
                self.beat()  # which may itself take long, so look again
            except OSError as error:
                raise BucketUnavailable(
                    f"{self.owner.node} cannot say that it owns {self.bucket}: {error}"
                ) from error

    def give_up(self) -> None:
        """Leave the bucket to whoever wants it, without letting them wait."""
        self.given_up = True
        with self._lock:
            if not self._lost and _largest(self.bucket, self.files) == self.owner.epoch:
                self._lost = True
                self._write(replace(self.owner, incarnation="", address=""))
            self._lost = True

    def _stale(self) -> StaleOwner:
        return StaleOwner(
            f"{self.bucket} was taken over from this process ({self.owner.node}, epoch"
            f" {self.owner.epoch}) by another node, since it was silent for too long. Nothing more"
            " is written or answered here; ask the new owner."
        )


class Watch:
    """Watches whether the owner of a bucket lives, by its count."""

    def __init__(self, bucket: Folder, files: Files = LOCAL) -> None:
        self.bucket = bucket
        self.files = files
        self._seen: tuple[int, str, int] | None = None
        self._since = 0.0
        self.moves = False
        """Whether the last look found another owner, or another count, than the one before."""

    def dead(self) -> Owner | None:
        """The owner, if it may be replaced: it gave up, died, or has stood still for long."""
        owner = read_owner(self.bucket, self.files)
        if owner is None or not owner.incarnation or owner.is_dead:
            return owner or Owner(0, "", "", "")
        seen = owner.epoch, owner.incarnation, owner.count
        if seen != self._seen:
            self.moves = self._seen is not None
            self._seen, self._since = seen, _now()
            return None
        return owner if _now() - self._since >= TAKEOVER_SECONDS else None


def refuse_living_owner(place: Place) -> None:
    """Raise BucketUnavailable while a node of a cluster owns the queue.

    To be called with a lease in the ledger, since an owner looks for those once it is the owner: so
    one of the two sees the other. Takes a moment if there is such an owner, and TAKEOVER_SECONDS if
    there is one that died.
    """
    watch = Watch(place.bucket)
    while (dead := watch.dead()) is None:
        if watch.moves:
            raise belongs_to_cluster(place, read_owner(watch.bucket))
        time.sleep(LOOK_SECONDS)
    if dead.incarnation:
        # It may only have slept; and the next who opens the queue here should not wait again.
        taken = Ownership.take(watch.bucket, dead.epoch, uuid.uuid4().hex, "", "")
        if taken is not None:
            taken.give_up()


def belongs_to_cluster(place: Place, owner: Owner | None) -> BucketUnavailable:
    return BucketUnavailable(
        f"queue {place.queue!r} at {place.root} belongs to a cluster, whose node"
        f" {owner.node if owner else ''!r} has it now. Join that cluster with"
        " persisting_torch.cluster.init() to use it, or stop its nodes."
    )


def _file(bucket: Folder, epoch: int) -> str:
    return os.path.join(bucket, FOLDER, str(epoch))


def _content(owner: Owner) -> bytes:
    return json.dumps(asdict(owner)).encode()


def _largest(bucket: Folder, files: Files) -> int | None:
    return max(_epochs(bucket, files), default=None)


def _epochs(bucket: Folder, files: Files) -> list[int]:
    names = files.names(os.path.join(bucket, FOLDER))
    return [int(name) for name in names if name.isdigit()]


def _now() -> float:
    """Seconds by a clock that goes on while the machine sleeps."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))
