-- A catalog as the first release made it.
BEGIN TRANSACTION;
CREATE TABLE adapters (
	id INTEGER NOT NULL, 
	tenant TEXT NOT NULL, 
	name TEXT NOT NULL, 
	current_version INTEGER NOT NULL, 
	last_version INTEGER NOT NULL, 
	revision INTEGER NOT NULL, 
	update_time INTEGER NOT NULL, 
	PRIMARY KEY (id), 
	UNIQUE (tenant, name)
);
INSERT INTO "adapters" VALUES(1,'acme','support',2,2,3,1767225604000000);
CREATE TABLE blobs (
	digest TEXT NOT NULL, 
	rank INTEGER NOT NULL, 
	targets TEXT NOT NULL, 
	source_bytes INTEGER NOT NULL, 
	create_time INTEGER NOT NULL, 
	PRIMARY KEY (digest)
);
INSERT INTO "blobs" VALUES('sha256:aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa',8,'["q_proj", "v_proj"]',1000,1767225601000000);
INSERT INTO "blobs" VALUES('sha256:bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb',8,'["q_proj", "v_proj"]',1000,1767225602000000);
CREATE TABLE events (
	revision INTEGER NOT NULL, 
	kind TEXT NOT NULL, 
	name TEXT NOT NULL, 
	version INTEGER NOT NULL, 
	digest TEXT NOT NULL, 
	time INTEGER NOT NULL, 
	PRIMARY KEY (revision)
);
INSERT INTO "events" VALUES(1,'registered','acme/support',1,'sha256:aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa',1767225601000000);
INSERT INTO "events" VALUES(2,'updated','acme/support',2,'sha256:bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb',1767225602000000);
INSERT INTO "events" VALUES(3,'pinned','acme/support',2,'sha256:bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb',1767225604000000);
CREATE TABLE images (
	digest TEXT NOT NULL, 
	layout_id TEXT NOT NULL, 
	state TEXT NOT NULL, 
	reason TEXT NOT NULL, 
	image_bytes INTEGER NOT NULL, 
	PRIMARY KEY (digest, layout_id), 
	FOREIGN KEY(digest) REFERENCES blobs (digest), 
	FOREIGN KEY(layout_id) REFERENCES layouts (layout_id)
);
CREATE TABLE layout_bases (
	base_model TEXT NOT NULL, 
	layout_id TEXT NOT NULL, 
	PRIMARY KEY (base_model, layout_id), 
	FOREIGN KEY(layout_id) REFERENCES layouts (layout_id)
);
INSERT INTO "layout_bases" VALUES('org/tiny','sha256:1111111111111111111111111111111111111111111111111111111111111111');
INSERT INTO "layout_bases" VALUES('tiny','sha256:1111111111111111111111111111111111111111111111111111111111111111');
CREATE TABLE layouts (
	layout_id TEXT NOT NULL, 
	body TEXT NOT NULL, 
	create_time INTEGER NOT NULL, 
	PRIMARY KEY (layout_id)
);
INSERT INTO "layouts" VALUES('sha256:1111111111111111111111111111111111111111111111111111111111111111','{"base_model": "org/tiny", "aliases": ["tiny"], "targets": [{"x": 1}]}',1767225603000000);
CREATE TABLE meta (
	"key" TEXT NOT NULL, 
	value TEXT, 
	PRIMARY KEY ("key")
);
INSERT INTO "meta" VALUES('schema_version','1');
INSERT INTO "meta" VALUES('compiler','formats (1,), revision 1');
CREATE TABLE versions (
	adapter_id INTEGER NOT NULL, 
	version INTEGER NOT NULL, 
	digest TEXT NOT NULL, 
	base_model TEXT NOT NULL, 
	source_uri TEXT NOT NULL, 
	labels TEXT NOT NULL, 
	pinned BOOLEAN NOT NULL, 
	create_time INTEGER NOT NULL, 
	delete_time INTEGER, 
	PRIMARY KEY (adapter_id, version), 
	FOREIGN KEY(adapter_id) REFERENCES adapters (id), 
	FOREIGN KEY(digest) REFERENCES blobs (digest)
);
INSERT INTO "versions" VALUES(1,1,'sha256:aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa','org/tiny','s3://adapters/support','{}',0,1767225601000000,NULL);
INSERT INTO "versions" VALUES(1,2,'sha256:bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb','org/tiny','s3://adapters/support','{"team": "cx"}',1,1767225602000000,NULL);
CREATE INDEX adapters_live ON adapters (id) WHERE current_version > 0;
CREATE INDEX versions_by_base_model ON versions (base_model, digest);
CREATE INDEX versions_deleted ON versions (delete_time) WHERE delete_time IS NOT NULL;
CREATE INDEX versions_pinned ON versions (digest) WHERE pinned IS 1;
CREATE INDEX versions_by_digest ON versions (digest);
COMMIT;
