"""The rows of a study by key, in an SQLite file that survives a killed process and takes several writers.

Rows are written in transactions, a group at a time. The write-ahead log (WAL) lets other processes read and write
meanwhile; a row that is there already is not written again, since equal keys have equal rows. The table ``questions``
has the last answer to each question, and the sources that built its schedules (`tasp_lab.study.evaluate.sources_of`).
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from tasp_lab.core.errors import StudyError
from tasp_lab.study.point import Row

RESULTS = "results.sqlite"

STORE_FORMAT = 2
"""The version of the tables of a store; a store of another version is refused."""

WAIT_S = 60.0
"""How long a writer waits for another one."""

_APPLICATION = 0x74617370
"""What SQLite calls the application of a file: ``tasp``."""


_TABLES = (
    """CREATE TABLE IF NOT EXISTS rows (
    key TEXT PRIMARY KEY, status TEXT NOT NULL, cells TEXT NOT NULL) WITHOUT ROWID""",
    """CREATE TABLE IF NOT EXISTS questions (
    question TEXT PRIMARY KEY, sources TEXT NOT NULL, key TEXT NOT NULL) WITHOUT ROWID""",
)
_ADD = """INSERT INTO rows VALUES (?, ?, ?) ON CONFLICT (key)
    DO UPDATE SET status = excluded.status, cells = excluded.cells WHERE rows.status IN ('settled', 'failed')"""
_LAST = """INSERT INTO questions VALUES (?, ?, ?) ON CONFLICT (question)
    DO UPDATE SET sources = excluded.sources, key = excluded.key"""


class Last(NamedTuple):
    """The last answer to a question: its key and status, and the sources that built its schedules."""

    key: str
    status: str
    sources: str


class Store:
    """The rows in a folder, or without one in memory. A context manager.

    Raises `StudyError` where it cannot be read or written.
    """

    def __init__(self, folder: Path | None) -> None:
        self.path = Path(":memory:") if folder is None else folder / RESULTS
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
        run("PRAGMA journal_mode=WAL")  # others read while one writes, and a killed writer leaves whole transactions
        with self._connection:  # commits, or rolls back
            run("BEGIN IMMEDIATE")  # two processes may open a new store at once: one waits, and finds the tables made
            for table in _TABLES:
                run(table)
            run(f"PRAGMA application_id={_APPLICATION}")
            run(f"PRAGMA user_version={STORE_FORMAT}")

    def add(self, found: Iterable[tuple[str, str, Row | str]]) -> None:
        """Keep answers, all of them or none: each with its question and the sources that built its schedules.

        An answer is a row, or the key of a row that is there. Rows that are there stay, unless a bound settled them or
        they failed.
        """
        found = list(found)
        rows = [(row["key"], row["status"], json.dumps(row)) for _, _, row in found if not isinstance(row, str)]
        last = [(question, sources, row if isinstance(row, str) else row["key"]) for question, sources, row in found]
        with self._named_errors(), self._connection:
            self._connection.execute("BEGIN IMMEDIATE")
            self._connection.executemany(_ADD, rows)
            self._connection.executemany(_LAST, last)

    def last(self) -> dict[str, Last]:
        """The last answers, by question."""
        with self._named_errors():
            found = self._connection.execute(
                "SELECT question, key, status, sources FROM questions JOIN rows USING (key)"
            )
            return {question: Last(*rest) for question, *rest in found}

    def rows(self, keys: Iterable[str]) -> dict[str, Row]:
        """Rows by key; keys without a row are left out."""
        wanted = set(keys)  # one scan: SQLite takes a limited number of keys in a query
        with self._named_errors():
            found = self._connection.execute("SELECT key, cells FROM rows")
            return {key: json.loads(cells) for key, cells in found if key in wanted}

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, ValueError) as error:
            if isinstance(error, sqlite3.OperationalError) and error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_ERROR:
                raise StudyError(f"{self.path}: {error}") from error  # a full disk, no permission, another writer
            raise StudyError(
                f"{self.path}: {error}; expected the store of a study: move this file away and run the study again, "
                "which answers its points anew"
            ) from error
