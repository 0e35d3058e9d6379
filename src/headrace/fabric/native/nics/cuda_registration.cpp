// Never run. See cuda_registration.h.
#include "nics/cuda_registration.h"

#include <sys/uio.h>

namespace headrace::fabric {

long register_cuda(fid_domain* domain, const CudaDevice& device, std::byte* data, std::size_t length,
                   std::uint64_t access, std::uint64_t key, fid_mr** region) {
  const iovec range{.iov_base = data, .iov_len = length};
  fi_mr_attr attributes{};
  attributes.mr_iov = &range;
  attributes.iov_count = 1;
  attributes.access = access;
  attributes.requested_key = key;
  attributes.iface = FI_HMEM_CUDA;
  attributes.device.cuda = device.ordinal();
  std::uint64_t flags = 0;
#ifdef FI_MR_DMABUF
  const Fd file = device.dmabuf(data, length);  // the registration keeps what it needs of it
  const fi_mr_dmabuf whole{.fd = file.get(), .offset = 0, .len = length, .base_addr = data};
  if (file) {
    attributes.dmabuf = &whole;
    flags = FI_MR_DMABUF;
  }
#endif
  return fi_mr_regattr(domain, &attributes, flags, region);
}

}  // namespace headrace::fabric
