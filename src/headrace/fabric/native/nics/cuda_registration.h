// Never run: CUDA memory registered with a NIC (FI_HMEM). Owns nothing; owner thread only.
#pragma once

#include <rdma/fi_domain.h>

#include <cstddef>
#include <cstdint>

#include "memory/cuda.h"

namespace headrace::fabric {

// As fi_mr_reg, for a range that `device` has mapped and a domain that was asked for FI_HMEM. By dmabuf where both
// libfabric's headers and the driver know it, else by what the kernel has for it (nvidia-peermem).
long register_cuda(fid_domain* domain, const CudaDevice& device, std::byte* data, std::size_t length,
                   std::uint64_t access, std::uint64_t key, fid_mr** region);

}  // namespace headrace::fabric
