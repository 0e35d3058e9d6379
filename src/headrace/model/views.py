"""The check that a step's views of the pool are the model's own, and large enough for its batch. Owns nothing."""

from collections.abc import Sequence

import numpy as np
import torch

from headrace.kvcache.layout import num_pages_for
from headrace.model.batch import Batch
from headrace.model.shape import ModelShape


def checked_page_size(views: Sequence[torch.Tensor], batch: Batch, shape: ModelShape, dtype: torch.dtype) -> int:
    """Of the views, which must be the model's and hold the batch's pages: kernels check no bounds."""
    num_pages, *page_shape = views[0].shape
    page_size = page_shape[-2]
    assert tuple(page_shape) == shape.kv_layout(page_size, "bf16").page_shape, f"{views[0].shape}"
    assert all(view.shape == views[0].shape and view.is_contiguous() for view in views), "views differ"
    assert all(view.dtype == dtype for view in views), "views are not of the model's dtype"
    assert int(batch.page_indices.max(initial=0)) < num_pages, "the batch was made for a larger pool"
    pages_of_rows = [num_pages_for(kv_len, page_size) for kv_len in batch.kv_lens.tolist()]
    assert np.diff(batch.page_indptr).tolist() == pages_of_rows, "the batch was made for another page size"
    return page_size
