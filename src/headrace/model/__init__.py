"""Models: from a checkpoint to logits over the paged KV cache. Knows neither requests nor schedules nor peers."""
