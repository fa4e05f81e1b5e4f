"""The rows of a study by key, in an SQLite file that survives a killed process and takes several writers.

Rows are written in transactions, a group at a time. The write-ahead log (WAL) lets other processes read and write
meanwhile; a row that is there already is not written again, since equal keys have equal rows.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tasp_lab.errors import StudyError
from tasp_lab.study.rows import Row

RESULTS = "results.sqlite"

STORE_FORMAT = 1
"""Of the tables; a store of another format is refused."""

WAIT_S = 60.0
"""How long a writer waits for another one."""

_APPLICATION = 0x74617370
"""What SQLite calls the application of a file: ``tasp``."""


_TABLE = """CREATE TABLE IF NOT EXISTS rows (
    key TEXT PRIMARY KEY, settled INTEGER NOT NULL, cells TEXT NOT NULL) WITHOUT ROWID"""
_ADD = """INSERT INTO rows VALUES (?, ?, ?)
    ON CONFLICT (key) DO UPDATE SET settled = excluded.settled, cells = excluded.cells WHERE rows.settled"""


class Store:
    """The rows in a folder. A context manager. Raises `StudyError` where it cannot be read or written."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / RESULTS
        with self._named_errors():
            self._connection = sqlite3.connect(self.path, timeout=WAIT_S, isolation_level=None)
            self._prepare()

    def _prepare(self) -> None:
        run = self._connection.execute
        application, version = (run(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version"))
        if (application, version) == (_APPLICATION, STORE_FORMAT):
            return
        if run("SELECT count(*) FROM sqlite_master").fetchone()[0] and application != _APPLICATION:
            raise StudyError(f"{self.path}: no store of a study, expected one or none")
        if version not in (0, STORE_FORMAT):
            raise StudyError(f"{self.path}: has format {version}, expected format {STORE_FORMAT} of this version")
        run("PRAGMA journal_mode=WAL")
        with self._transaction():
            run(_TABLE)
            run(f"PRAGMA application_id={_APPLICATION}")
            run(f"PRAGMA user_version={STORE_FORMAT}")

    def add(self, rows: Iterable[Row]) -> None:
        """Keep rows, all of them or none. Those that are there stay, unless a bound settled them."""
        texts = [(row["key"], row["status"] == "settled", json.dumps(row)) for row in rows]
        with self._named_errors(), self._transaction():
            self._connection.executemany(_ADD, texts)

    def keys(self, settled: bool = True) -> set[str]:
        """The keys of all rows; without `settled` of those only that no bound settled."""
        with self._named_errors():
            found = self._connection.execute("SELECT key FROM rows WHERE ? OR settled = 0", (settled,))
            return {key for (key,) in found}

    def rows(self, keys: Iterable[str]) -> dict[str, Row]:
        """Rows by key; keys without a row are left out."""
        wanted = set(keys)
        with self._named_errors():
            found = self._connection.execute("SELECT key, cells FROM rows")
            return {key: json.loads(cells) for key, cells in found if key in wanted}

    def close(self) -> None:
        """Close the file."""
        self._connection.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            with suppress(sqlite3.Error):  # a full disk ends the transaction
                self._connection.execute("ROLLBACK")
            raise
        self._connection.execute("COMMIT")

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise StudyError(f"{self.path}: {error}") from error
