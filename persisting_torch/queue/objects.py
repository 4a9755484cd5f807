"""Objects of a bucket of an object store as files, each made or replaced by one request."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, BinaryIO

from persisting_torch.errors import PersistingError

if TYPE_CHECKING:
    from obstore import WritableFile
    from obstore.store import ObjectStore

SCHEMES = ("s3",)
BUFFER_BYTES = 8 << 20
RETRIES = 3
RETRY_SECONDS = 10.0
CLIENT = {"timeout": "20s", "connect_timeout": "5s"}  # of one request, unless options say so
OF_CLIENT = frozenset(CLIENT) | {
    "allow_http",
    "allow_invalid_certificates",
    "proxy_ca_certificate",
    "proxy_url",
    "user_agent",
}
OF_LANCE = frozenset({"client_max_retries", "client_retry_timeout", "download_retry_count"})


def is_url(path: object) -> bool:
    return re.match(r"\w[\w+.-]*:/", str(path)) is not None


class ObjectFiles:
    """What lies under a URL such as s3://bucket/folder; paths are URLs that begin with it.

    `options` are Lance's storage_options: aws_access_key_id, aws_secret_access_key, aws_region,
    aws_endpoint, allow_http, ...; what they do not say comes from the environment.
    """

    def __init__(self, root: str, options: Mapping[str, str] | None = None) -> None:
        """Asks for nothing yet. Raises PersistingError for options that mean nothing."""
        self.root = root
        self.options: dict[str, str] | None = dict(options or {})
        self._store = _open(root, self.options)

    def exists(self, path: str) -> bool:
        import obstore

        try:
            with self._errors():
                obstore.head(self._store, self._key(path))
        except FileNotFoundError:
            return bool(self.names(path))
        return True

    def names(self, folder: str) -> list[str]:
        found = self._listed(f"{folder}/")
        below = [str(entry["path"]) for entry in found["objects"]] + found["common_prefixes"]
        return [path.rstrip("/").rpartition("/")[2] for path in below]

    def _listed(self, path: str) -> Any:
        import obstore

        with self._errors():
            return obstore.list_with_delimiter(self._store, self._key(path))

    def read(self, path: str) -> bytes:
        import obstore

        with self._errors():
            return bytes(obstore.get(self._store, self._key(path)).bytes())

    def create(self, path: str, content: bytes) -> bool:
        import obstore
        from obstore.exceptions import AlreadyExistsError

        with self._errors():
            try:
                # One request: parts of an upload could not be conditional together.
                obstore.put(
                    self._store, self._key(path), content, mode="create", use_multipart=False
                )
            except AlreadyExistsError:
                # Perhaps by this very request, sent again for want of an answer.
                return self.read(path) == content
        return True

    def replace(self, path: str, content: bytes) -> None:
        import obstore

        with self._errors():
            obstore.put(self._store, self._key(path), content)

    def remove(self, paths: Iterable[str]) -> None:
        import obstore

        with self._errors():
            obstore.delete(self._store, [self._key(path) for path in paths])

    def reading(self, path: str) -> BinaryIO:
        import obstore

        # Not obstore's own reader, which looks under the folder twice until 0.12.
        key = self._key(path)
        with self._errors():
            size = int(obstore.head(self._store, key)["size"])
        read = partial(obstore.get_range, self._store, key)
        return io.BufferedReader(_Reading(read, size, self._errors), BUFFER_BYTES)

    @contextmanager
    def writing(self, path: str) -> Iterator[BinaryIO]:
        import obstore

        with self._errors():
            draft = obstore.open_writer(self._store, self._key(path), buffer_size=BUFFER_BYTES)
        with io.BufferedWriter(_Writing(draft, self._errors), BUFFER_BYTES) as file:
            yield file
            file.flush()
            with self._errors():
                draft.close()  # which makes the object; without it there is none

    def size(self, path: str) -> int:
        import obstore

        with self._errors():
            listed = obstore.list(self._store, self._key(path))
            return sum(int(entry["size"]) for entries in listed for entry in entries)

    def _key(self, path: str) -> str:
        if not path.startswith(self.root):
            raise ValueError(f"{path} is not under {self.root}")
        return path[len(self.root) :].lstrip("/")

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Say what went wrong as an OSError, in a line."""
        from obstore.exceptions import (
            BaseError,
            PermissionDeniedError,
            UnauthenticatedError,
        )

        try:
            yield
        except FileNotFoundError as error:
            if "NoSuchBucket" in str(error):
                raise OSError(self._no_bucket()) from error
            raise FileNotFoundError(_line(error)) from error
        except (PermissionDeniedError, UnauthenticatedError) as error:
            raise PermissionError(_line(error)) from error
        except BaseError as error:
            raise OSError(
                self._no_bucket() if "NoSuchBucket" in str(error) else _line(error)
            ) from error

    def _no_bucket(self) -> str:
        return f"there is no bucket {self.root.split('/')[2]!r}"


class _Reading(io.RawIOBase):
    """An object as a file that is read, a request for each part."""

    def __init__(
        self,
        read: Callable[..., Any],
        size: int,
        errors: Callable[[], AbstractContextManager[None]],
    ):
        self._read = read
        self._size = size
        self._errors = errors
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        if start + offset < 0:
            raise ValueError(f"there is nothing {-start - offset} bytes before the beginning")
        self._at = start + offset
        return self._at

    def readinto(self, buffer: Any, /) -> int:
        length = min(len(buffer), max(0, self._size - self._at))
        if length:
            with self._errors():
                buffer[:length] = memoryview(self._read(start=self._at, length=length))
            self._at += length
        return length


class _Writing(io.RawIOBase):
    """An object as a file that is written."""

    def __init__(self, draft: WritableFile, errors: Callable[[], AbstractContextManager[None]]):
        self._draft = draft
        self._errors = errors

    def writable(self) -> bool:
        return True

    def write(self, content: Any, /) -> int:
        with self._errors():
            return int(self._draft.write(bytes(content)))


def _open(root: str, options: dict[str, str]) -> ObjectStore:
    try:
        from obstore.exceptions import BaseError
        from obstore.store import from_url
    except ImportError as error:
        raise PersistingError(
            f"{root} is in an object store, for which the package obstore is needed. Install it"
            " with pip install 'persisting_torch[s3]'."
        ) from error
    known = {name: value for name, value in options.items() if name not in OF_LANCE}
    client = CLIENT | {name: value for name, value in known.items() if name in OF_CLIENT}
    if "AWS_ALLOW_HTTP" in os.environ:  # which obstore does not look at, but Lance does
        client.setdefault("allow_http", os.environ["AWS_ALLOW_HTTP"])
    try:
        return from_url(
            root,
            config={name: value for name, value in known.items() if name not in OF_CLIENT},
            client_options=client,
            retry_config={
                "max_retries": RETRIES,
                "retry_timeout": timedelta(seconds=RETRY_SECONDS),
            },
        )
    except (BaseError, ValueError, TypeError) as error:
        raise PersistingError(
            f"{root} cannot be reached with these storage_options: {_line(error)}. They are those"
            " of Lance: aws_access_key_id, aws_secret_access_key, aws_region, aws_endpoint,"
            " allow_http."
        ) from error


def _line(error: BaseException) -> str:
    """The first line of an error, without the debug output that follows it."""
    said = str(error).partition("\n\nDebug source")[0]
    code = re.search(r"<Code>(\w+)</Code>.*?<Message>(.*?)</Message>", said, re.DOTALL)
    said = said.partition(": <?xml")[0].partition("\n")[0]
    return f"{said} ({code[1]}: {code[2]})" if code else said
