#include "nics/providers.h"

#include <rdma/fi_errno.h>

#include "errors.h"

namespace headrace::fabric {
namespace {

constexpr std::uint32_t kOldest = FI_VERSION(1, 17);
// efa writes by RDMA whatever the NIC's age for those who ask for 1.18; dmabuf came with 1.20. Never more than our
// headers know: the records that are passed grow with the version.
constexpr std::uint32_t kRdma = std::min<std::uint32_t>(kHeaders, FI_VERSION(1, 20));

[[noreturn]] void refuse(const char* what, const std::string& why) { throw FabricError(what, FI_ENOSYS, why); }

}  // namespace

Asked plan_ask(const std::string& provider, const Local& local, bool on_device) {
  const Traits named{.provider = provider};
  Asked asked{.api = named.is_rdma() ? kRdma : kOldest, .caps = FI_MSG | FI_RMA};
  if (on_device) asked.caps |= FI_HMEM;
  if (named.is_efa()) {
    // Not FI_LOCAL_COMM: its peers of this host would go through shared memory, where a write can outlive its region,
    // and which has no file to wait on.
    asked.caps |= FI_REMOTE_COMM;
    if (!local.node.empty()) asked.domain = local.node + "-rdm";
    return asked;
  }
  if (named.is_shm() &&
      !local.name.empty()) {  // of one peer; its room lies in /dev/shm, a write takes two places there
    asked.num_out = kShmWrites;
    asked.num_in = 2 * kShmWrites;
  }
  asked.address = local.node;
  if (local.port != 0) asked.port = std::to_string(local.port);
  return asked;
}

void require_traits(const Traits& traits) {
  const std::string& name = traits.provider;
  if (traits.cq_data_size < 4) refuse("cq_data_size", name + " carries fewer than the 4 bytes of an imm");
  if (!traits.ordered_messages) refuse("FI_ORDER_SAS", name + " does not keep messages in order");
  if (traits.emulated_writes)
    refuse("FI_OPT_EFA_EMULATED_WRITE",
           name +
               " has writes carried out by the receiver's processor: it needs a NIC with RDMA write, and headrace "
               "built with libfabric 1.18 or later");
  if (traits.is_rdma() && !traits.local_registration)
    refuse("FI_MR_LOCAL", name + " would register what it sends by itself, and keep it registered");
  if (traits.is_rdma() && traits.lasting_regions)
    refuse("FI_MR_CACHE_MAX_COUNT",
           name + " keeps closed registrations open to its peers: set it to 0 before the start");
}

}  // namespace headrace::fabric
