"""What travels between processes: msgspec structs, tagged and closed. Knows no transport and keeps no state."""
