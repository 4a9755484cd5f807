"""The tables of a ledger in SQL, and how those of older formats become them."""

from __future__ import annotations

LEDGER_FORMAT = 2

SINCE_FORMAT_2 = """CREATE TABLE dropped (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, task INTEGER NOT NULL, reason TEXT NOT NULL,
    first INTEGER NOT NULL, count INTEGER NOT NULL, members BLOB);
CREATE TABLE notes (
    task INTEGER NOT NULL, key TEXT NOT NULL, value TEXT NOT NULL,
    PRIMARY KEY (task, key)) WITHOUT ROWID;
CREATE TABLE leased (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, task INTEGER NOT NULL, producer TEXT NOT NULL,
    first INTEGER NOT NULL, count INTEGER NOT NULL, members BLOB);
CREATE TABLE checkpoints (
    task INTEGER NOT NULL, path TEXT NOT NULL, k INTEGER NOT NULL,
    PRIMARY KEY (task, path)) WITHOUT ROWID;
CREATE TABLE past (task INTEGER PRIMARY KEY, k INTEGER NOT NULL, members BLOB NOT NULL);
CREATE TABLE clock (first_row INTEGER PRIMARY KEY, at REAL NOT NULL);
CREATE TABLE custom (sample INTEGER PRIMARY KEY, note TEXT NOT NULL);
CREATE TABLE requests (id TEXT PRIMARY KEY, at REAL NOT NULL) WITHOUT ROWID;
CREATE TABLE places (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, first_row INTEGER NOT NULL, count INTEGER NOT NULL,
    bucket INTEGER NOT NULL, bucket_row INTEGER NOT NULL);
"""

TABLES = f"""
CREATE TABLE meta (key TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE partitions (id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, sealed REAL);
CREATE TABLE fields (
    seq INTEGER PRIMARY KEY, name TEXT NOT NULL, path TEXT NOT NULL,
    field_column TEXT UNIQUE, type TEXT);
CREATE TABLE field_sets (id INTEGER PRIMARY KEY, names TEXT NOT NULL UNIQUE);
CREATE TABLE runs (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    first_index INTEGER NOT NULL, count INTEGER NOT NULL, first_row INTEGER NOT NULL,
    members BLOB);
CREATE INDEX runs_by_end ON runs (first_row + count);
CREATE TABLE arrivals (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, partition INTEGER NOT NULL, field_set INTEGER NOT NULL,
    first INTEGER NOT NULL, count INTEGER NOT NULL, members BLOB);
CREATE INDEX arrivals_by_end ON arrivals (partition, field_set, first + count);
CREATE TABLE late (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, field_set INTEGER NOT NULL,
    first_row INTEGER NOT NULL, count INTEGER NOT NULL);
CREATE TABLE cleared (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, partition INTEGER NOT NULL,
    first INTEGER NOT NULL, count INTEGER NOT NULL, members BLOB);
CREATE TABLE tasks (
    id INTEGER PRIMARY KEY, name TEXT NOT NULL, partition INTEGER NOT NULL,
    epoch INTEGER NOT NULL DEFAULT 0, cursor INTEGER NOT NULL DEFAULT 0,
    UNIQUE (name, partition));
CREATE TABLE claims (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, task INTEGER NOT NULL,
    first INTEGER NOT NULL, count INTEGER NOT NULL, members BLOB);
CREATE TABLE consumed (task INTEGER PRIMARY KEY, seq INTEGER NOT NULL, members BLOB NOT NULL);
CREATE TABLE assignments (
    task INTEGER NOT NULL, k INTEGER NOT NULL,
    batch_size INTEGER NOT NULL, sizes TEXT NOT NULL, padding TEXT NOT NULL,
    first INTEGER NOT NULL, count INTEGER NOT NULL, members BLOB,
    PRIMARY KEY (task, k)) WITHOUT ROWID;
CREATE TABLE ends (
    task INTEGER PRIMARY KEY, k INTEGER NOT NULL, terms TEXT NOT NULL);
CREATE TABLE rank_batches (
    task INTEGER NOT NULL, dp_rank INTEGER NOT NULL, batch_index INTEGER NOT NULL,
    first INTEGER NOT NULL, count INTEGER NOT NULL, members BLOB,
    PRIMARY KEY (task, dp_rank, batch_index)) WITHOUT ROWID;
CREATE TABLE keys (
    partition INTEGER NOT NULL, key TEXT NOT NULL, sample INTEGER NOT NULL, tag TEXT,
    PRIMARY KEY (partition, key)) WITHOUT ROWID;
CREATE INDEX keys_of_sample ON keys (sample);
CREATE TABLE leases (
    host TEXT NOT NULL, boot TEXT NOT NULL, pid INTEGER NOT NULL, handle INTEGER NOT NULL,
    name TEXT NOT NULL, expires REAL NOT NULL,
    PRIMARY KEY (host, boot, pid, handle)) WITHOUT ROWID;
CREATE TABLE producers (
    name TEXT PRIMARY KEY, host TEXT NOT NULL, pid INTEGER NOT NULL, started REAL NOT NULL,
    born TEXT NOT NULL, beat REAL NOT NULL, state TEXT NOT NULL, cause TEXT,
    essential INTEGER NOT NULL DEFAULT 0) WITHOUT ROWID;
CREATE TABLE pending (store TEXT PRIMARY KEY, first_row INTEGER NOT NULL, count INTEGER NOT NULL,
    note TEXT NOT NULL) WITHOUT ROWID;
{SINCE_FORMAT_2}
INSERT INTO meta VALUES ('format', 2), ('next_index', 0), ('partitions', 0), ('tasks', 0);
CREATE TRIGGER partition_made AFTER INSERT ON partitions BEGIN
    UPDATE meta SET value = value + 1 WHERE key = 'partitions'; END;
CREATE TRIGGER partition_changed AFTER UPDATE ON partitions BEGIN
    UPDATE meta SET value = value + 1 WHERE key = 'partitions'; END;
CREATE TRIGGER task_made AFTER INSERT ON tasks BEGIN
    UPDATE meta SET value = value + 1 WHERE key = 'tasks'; END;
CREATE TRIGGER task_changed AFTER UPDATE ON tasks BEGIN
    UPDATE meta SET value = value + 1 WHERE key = 'tasks'; END;
"""

FROM_1_TO_2 = f"""
ALTER TABLE producers ADD COLUMN essential INTEGER NOT NULL DEFAULT 0;
ALTER TABLE runs ADD COLUMN members BLOB;
{SINCE_FORMAT_2}UPDATE meta SET value = 2 WHERE key = 'format';
"""

# For reading only. (AUTOINCREMENT would put a sqlite_sequence of its own before the ledger's.)
AS_FORMAT_2 = (
    SINCE_FORMAT_2.replace("CREATE TABLE", "CREATE TEMP TABLE").replace(" AUTOINCREMENT", "")
    + "CREATE TEMP VIEW producers AS SELECT *, 0 AS essential FROM main.producers;"
    + "CREATE TEMP VIEW runs AS SELECT *, NULL AS members FROM main.runs;"
)
