"""The KV messenger: tickets, counters, step programs, leases, revocation. It knows pages and peers, no model."""
