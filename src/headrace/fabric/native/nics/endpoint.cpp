#include "nics/endpoint.h"

#include <rdma/fi_cm.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_ext.h>
#include <rdma/fi_rma.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <utility>

#include "clock.h"
#include "errors.h"
#include "keys.h"
#include "nics/cuda_registration.h"
#include "nics/sockets.h"
#include "signals.h"

namespace headrace::fabric {
namespace {

constexpr std::size_t kQueueSize = 8192;
constexpr std::size_t kShmQueueSize = 256;  // of one endpoint for each peer
constexpr std::size_t kBatch = 64;
constexpr std::uint64_t kHangUp = 2'000'000'000;  // what is in the sockets is read first: megabytes at most
// Ops that failed may complete in error a second time: they rest this long before they are used again.
constexpr std::size_t kRetired = 16384;

const char* or_null(const std::string& text) { return text.empty() ? nullptr : text.c_str(); }

// Each provider's default for when a write is complete is what we need: its source may be reused. That it was delivered
// (FI_DELIVERY_COMPLETE) would cost another message and prove nothing.
fi_info* ask(const std::string& provider, const Local& local, bool on_device) {
  const Asked asked = plan_ask(provider, local, on_device);
  const std::unique_ptr<fi_info, void (*)(fi_info*)> hints(fi_allocinfo(), fi_freeinfo);
  hints->caps = asked.caps;
  hints->mode = FI_CONTEXT | FI_CONTEXT2;
  hints->ep_attr->type = FI_EP_RDM;
  // Rules efa-direct out as well, which keeps no order and knows only peers that it was told of.
  hints->tx_attr->msg_order = FI_ORDER_SAS;
  hints->rx_attr->msg_order = FI_ORDER_SAS;
  hints->domain_attr->mr_mode = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY | FI_MR_ENDPOINT;
  if (on_device) hints->domain_attr->mr_mode |= FI_MR_HMEM;
  hints->domain_attr->threading = FI_THREAD_DOMAIN;
  if (!asked.domain.empty()) hints->domain_attr->name = ::strdup(asked.domain.c_str());
  hints->fabric_attr->prov_name = ::strdup(provider.c_str());
  hints->tx_attr->size = asked.num_out;
  hints->rx_attr->size = asked.num_in;
  fi_info* info = nullptr;
  const int rc = fi_getinfo(asked.api, or_null(asked.address), or_null(asked.port),
                            asked.address.empty() ? 0 : FI_SOURCE, hints.get(), &info);
  if (rc != 0) throw FabricError("fi_getinfo(" + provider + ", " + local.node + ")", -rc, fi_strerror(-rc));
  return info;
}

// Of verbs, unless told not to. It reads this when libfabric is first used; native.py sets it before.
bool keeps_regions(const std::string& provider) {
  const char* most = std::getenv("FI_MR_CACHE_MAX_COUNT");
  return Traits{.provider = provider}.is_verbs() && (most == nullptr || std::strcmp(most, "0") != 0);
}

// FI_RMA may be missing. A message may carry data too (FI_RECV): that needs no key, so it counts for nothing.
bool is_arrival(const fi_cq_data_entry& entry) {
  return (entry.flags & FI_REMOTE_CQ_DATA) != 0 && (entry.flags & (FI_WRITE | FI_SEND | FI_RECV)) == 0;
}

}  // namespace

bool has_provider(const std::string& provider) {
  const SignalHandlers handlers;
  try {
    const Endpoint opened(provider, {});
    return true;
  } catch (const FabricError&) {
    return false;
  }
}

Endpoint::Endpoint(const std::string& provider, const Local& local, std::shared_ptr<CudaDevice> device)
    : device_(std::move(device)) {
  open(provider, local);
  read_traits();
  require_traits(traits_);
  std::array<char, 512> name{};
  std::size_t length = name.size();
  check("fi_getname", fi_getname(&endpoint_->fid, name.data(), &length));
  name_.assign(name.data(), length);
}

Endpoint::~Endpoint() {
  if (!hang_up()) {
    // Never seen; a few open files are better than a crash.
    for (auto& chunk : chunks_) chunk.release();
    source_.region.release();
    endpoint_.release(), queue_.release(), addresses_.release(), domain_.release(), fabric_.release();
    return;
  }
  // Registrations bound to the endpoint must go before it.
  source_.region.reset();
  for (auto& chunk : chunks_) chunk->registration.region.reset();
}

// libfabric 1.17's tcp provider crashes when a connection is closed that has half received a write: it reports the
// write as cancelled with no context, and rxm follows that null pointer. A write that ends in a broken connection is
// dropped without a report, so the connections are broken first and their ends read.
bool Endpoint::hang_up() {
  if (!is_tcp()) return true;
  std::vector<Completion> dropped;
  for (const std::uint64_t until = now_ns() + kHangUp; now_ns() < until; ::usleep(100)) {
    const auto sockets = connected_sockets(wait_fd_);
    if (!sockets) continue;
    if (sockets->empty()) return true;
    for (const int socket : *sockets) ::shutdown(socket, SHUT_RDWR);
    try {
      for (int batch = 0; batch < 16; ++batch) read(dropped);
    } catch (const FabricError&) {
      return false;  // the queue may be what failed
    }
    dropped.clear();
  }
  return false;
}

std::optional<std::vector<Connection>> Endpoint::connections() const {
  return is_tcp() ? fabric::connections(wait_fd_) : std::nullopt;
}

void Endpoint::keep_alive() const {
  if (is_tcp()) fabric::keep_alive(wait_fd_);
}

void Endpoint::open(const std::string& provider, const Local& local) {
  info_.reset(ask(provider, local, device_ != nullptr));
  fid_fabric* fabric = nullptr;
  check("fi_fabric", fi_fabric(info_->fabric_attr, &fabric, nullptr));
  fabric_.reset(fabric);
  fid_domain* domain = nullptr;
  check("fi_domain", fi_domain(fabric, info_.get(), &domain, nullptr));
  domain_.reset(domain);
  fi_av_attr av_attr{};
  av_attr.type = FI_AV_TABLE;
  fid_av* addresses = nullptr;
  check("fi_av_open", fi_av_open(domain, &av_attr, &addresses, nullptr));
  addresses_.reset(addresses);
  fi_cq_attr cq_attr{};
  const bool is_shm = Traits{.provider = provider}.is_shm();
  cq_attr.size = is_shm ? kShmQueueSize : kQueueSize;
  cq_attr.format = FI_CQ_FORMAT_DATA;
  cq_attr.wait_obj = is_shm ? FI_WAIT_NONE : FI_WAIT_FD;
  fid_cq* queue = nullptr;
  int rc = fi_cq_open(domain, &cq_attr, &queue, nullptr);
  if (rc == -FI_ENOSYS) {  // efa before libfabric 2.5: its owner has to look, as shm's
    cq_attr.wait_obj = FI_WAIT_NONE;
    rc = fi_cq_open(domain, &cq_attr, &queue, nullptr);
  }
  check("fi_cq_open", rc);
  queue_.reset(queue);
  fid_ep* endpoint = nullptr;
  check("fi_endpoint", fi_endpoint(domain, info_.get(), &endpoint, nullptr));
  endpoint_.reset(endpoint);
  check("fi_ep_bind(av)", fi_ep_bind(endpoint, &addresses->fid, 0));
  check("fi_ep_bind(cq)", fi_ep_bind(endpoint, &queue->fid, FI_TRANSMIT | FI_RECV));
  if (!local.name.empty()) {
    std::string name = local.name;
    check("fi_setname", fi_setname(&endpoint->fid, name.data(), name.size() + 1));
  }
  check("fi_enable", fi_enable(endpoint));
  if (cq_attr.wait_obj == FI_WAIT_FD) check("fi_control(FI_GETWAIT)", fi_control(&queue->fid, FI_GETWAIT, &wait_fd_));
}

void Endpoint::read_traits() {
  const int mode = info_->domain_attr->mr_mode;
  traits_.provider = info_->fabric_attr->prov_name;
  traits_.virtual_addressing = (mode & FI_MR_VIRT_ADDR) != 0;
  traits_.provider_keys = (mode & FI_MR_PROV_KEY) != 0;
  traits_.local_registration = (mode & FI_MR_LOCAL) != 0;
  traits_.endpoint_registration = (mode & FI_MR_ENDPOINT) != 0;
  traits_.ordered_messages = (info_->tx_attr->msg_order & info_->rx_attr->msg_order & FI_ORDER_SAS) != 0;
  traits_.emulated_writes = traits_.is_efa() && emulates_writes();
  traits_.lasting_regions = keeps_regions(traits_.provider);
  traits_.mr_key_size = info_->domain_attr->mr_key_size;
  traits_.cq_data_size = info_->domain_attr->cq_data_size;
  traits_.inject_size = info_->tx_attr->inject_size;
  traits_.iov_limit = info_->tx_attr->iov_limit;
  traits_.rma_iov_limit = info_->tx_attr->rma_iov_limit;
  traits_.tx_size = info_->tx_attr->size;
  traits_.rx_size = info_->rx_attr->size;
  traits_.max_message = info_->ep_attr->max_msg_size;
  traits_.wait_fd = wait_fd_ >= 0;
}

// Of an efa endpoint.
bool Endpoint::emulates_writes() {
#if FI_MAJOR_VERSION > 1 || FI_MINOR_VERSION >= 18
  bool emulated = true;
  std::size_t size = sizeof emulated;
  const int rc = fi_getopt(&endpoint_->fid, FI_OPT_ENDPOINT, FI_OPT_EFA_EMULATED_WRITE, &emulated, &size);
  return rc != 0 || emulated;
#else
  return true;  // as all of 1.17 did
#endif
}

fi_addr_t Endpoint::insert(const std::string& address) {
  fi_addr_t inserted = FI_ADDR_UNSPEC;
  const bool fits = traits_.is_shm() || address.size() == name_.size();
  if (!fits || fi_av_insert(addresses_.get(), address.data(), 1, &inserted, 0, nullptr) != 1)
    throw InputError("address",
                     "not an address of " + traits_.provider + " (" + std::to_string(name_.size()) + " bytes)");
  return inserted;
}

Registration Endpoint::register_shared(std::byte* data, std::size_t length, std::uint64_t access, std::uint64_t key) {
  return register_memory(device_.get(), data, length, access, key);
}

Registration Endpoint::register_memory(const CudaDevice* device, std::byte* data, std::size_t length,
                                       std::uint64_t access, std::uint64_t key) {
  fid_mr* region = nullptr;
  long rc = -FI_ENOKEY;
  // Where we choose the keys, two may collide; another draw will not.
  for (int draw = 0; draw < 8 && rc == -FI_ENOKEY; ++draw) {
    const std::uint64_t drawn = traits_.provider_keys ? 0 : key != 0 ? key : random_key(traits_.mr_key_size);
    rc = device != nullptr ? register_cuda(domain_.get(), *device, data, length, access, drawn, &region)
                           : fi_mr_reg(domain_.get(), data, length, access, 0, drawn, 0, &region, nullptr);
  }
  check("fi_mr_reg", rc);
  Registration registration{.region = Opened<fid_mr>(region), .key = fi_mr_key(region)};
  if (traits_.endpoint_registration) {
    check("fi_mr_bind", fi_mr_bind(region, &endpoint_->fid, 0));
    check("fi_mr_enable", fi_mr_enable(region));
    registration.key = fi_mr_key(region);
  }
  return registration;
}

Op* Endpoint::take(OpKind kind) {
  ++num_taken_;
  auto& free = free_[static_cast<std::size_t>(kind)];
  if (free.empty()) grow(kind);
  Op* op = free.back();
  free.pop_back();
  op->state = OpState::live;
  return op;
}

void Endpoint::grow(OpKind kind) {
  auto chunk = std::make_unique<Chunk>();
  if (kind != OpKind::write) {
    chunk->buffers.resize(kChunk * kFragment);
    if (traits_.local_registration)
      chunk->registration = register_memory(nullptr, chunk->buffers.data(), chunk->buffers.size(), FI_SEND | FI_RECV);
  }
  for (std::size_t i = 0; i < kChunk; ++i) {
    Op& op = chunk->ops[i];
    op.kind = kind;
    if (!chunk->buffers.empty()) op.buffer = chunk->buffers.data() + i * kFragment;
    op.descriptor = chunk->registration.descriptor();
    free_[static_cast<std::size_t>(kind)].push_back(&op);
  }
  chunks_.push_back(std::move(chunk));
}

void Endpoint::recycle(Op* op, bool failed) {
  --num_taken_;
  op->state = OpState::free;
  op->transfer.reset();
  op->message.reset();
  if (failed) {
    retired_.push_back(op);
    if (retired_.size() <= kRetired) return;
    op = retired_.front();
    retired_.pop_front();
  }
  free_[static_cast<std::size_t>(op->kind)].push_back(op);
}

void Endpoint::abandon(std::uint64_t peer) {
  for (auto& chunk : chunks_) {
    for (Op& op : chunk->ops) {
      if (op.state != OpState::live || op.kind == OpKind::receive || op.peer != peer) continue;
      op.state = OpState::abandoned;
      ++num_abandoned_;
      op.transfer.reset();
      op.message.reset();
    }
  }
}

void Endpoint::fail_all(int code, const std::string& text, std::vector<Completion>& completions) {
  for (auto& chunk : chunks_)
    for (Op& op : chunk->ops)
      if (op.state == OpState::live) completions.push_back({.endpoint = this, .op = &op, .code = code, .text = text});
}

// The op of a completion, if anybody waits for it.
Op* Endpoint::claim(void* context) {
  auto* op = static_cast<Op*>(static_cast<fi_context2*>(context));
  if (op != nullptr && op->state == OpState::abandoned) {
    recycle(op, true);
    --num_abandoned_;
  }
  return op != nullptr && op->state == OpState::live ? op : nullptr;
}

void Endpoint::register_source(std::byte* data, std::size_t length) {
  if (traits_.local_registration) source_ = register_shared(data, length, FI_WRITE | FI_READ);
}

long Endpoint::post_write(Op* op, fi_addr_t to, const std::byte* from, std::size_t length, std::uint32_t imm,
                          RemotePlace place) {
  return fi_writedata(endpoint_.get(), from, length, source_.descriptor(), imm, to, place.at, place.key,
                      static_cast<fi_context2*>(op));
}

long Endpoint::post_send(Op* op, fi_addr_t to, std::size_t length) {
  return fi_send(endpoint_.get(), op->buffer, length, op->descriptor, to, static_cast<fi_context2*>(op));
}

long Endpoint::post_receive(Op* op) {
  return fi_recv(endpoint_.get(), op->buffer, kFragment, op->descriptor, FI_ADDR_UNSPEC, static_cast<fi_context2*>(op));
}

void Endpoint::read(std::vector<Completion>& completions) {
  std::array<fi_cq_data_entry, kBatch> entries;
  const long count = fi_cq_read(queue_.get(), entries.data(), entries.size());
  if (count == -FI_EAVAIL) return read_error(completions);
  if (count == -FI_EAGAIN) return;
  check("fi_cq_read", count);
  for (long i = 0; i < count; ++i) {
    const auto& entry = entries[static_cast<std::size_t>(i)];
    Completion completion{.endpoint = this};
    if (is_arrival(entry)) {
      completion.imm = static_cast<std::uint32_t>(entry.data);
    } else {
      completion.op = claim(entry.op_context);
      completion.length = entry.len;
      if (completion.op == nullptr) continue;
    }
    completions.push_back(std::move(completion));
  }
}

void Endpoint::read_error(std::vector<Completion>& completions) {
  fi_cq_err_entry error{};
  const long count = fi_cq_readerr(queue_.get(), &error, 0);
  if (count == -FI_EAGAIN) return;
  check("fi_cq_readerr", count);
  Completion completion{.endpoint = this};
  // Errors of connections carry no context; those of operations may be told twice.
  completion.op = claim(error.op_context);
  if (completion.op == nullptr) return;
  completion.code = error.err != 0 ? error.err : FI_EIO;
  completion.text = fi_strerror(completion.code);
  std::array<char, 256> detail{};
  const char* told = fi_cq_strerror(queue_.get(), error.prov_errno, error.err_data, detail.data(), detail.size());
  if (told != nullptr && completion.text != told) completion.text += std::string(" (") + told + ")";
  completions.push_back(std::move(completion));
}

bool Endpoint::may_sleep() {
  if (!traits_.wait_fd) return true;
  fid* waited = &queue_->fid;
  return fi_trywait(fabric_.get(), &waited, 1) == FI_SUCCESS;
}

}  // namespace headrace::fabric
