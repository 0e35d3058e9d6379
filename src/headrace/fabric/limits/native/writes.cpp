#include "writes.h"

#include <rdma/fi_cm.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>

#include <array>
#include <cstring>
#include <random>

#include "errors.h"
#include "rounds.h"
#include "signals.h"

namespace headrace::fabric::limits {
namespace {

constexpr std::uint32_t kVersion = FI_VERSION(1, 17);
constexpr std::size_t kQueueSize = 8192;
constexpr std::size_t kBatch = 64;
constexpr std::size_t kFewWindow = 16;  // of answers and of eight bytes to and fro

fi_info* ask(const std::string& provider, const std::string& node) {
  const std::unique_ptr<fi_info, void (*)(fi_info*)> hints(fi_allocinfo(), fi_freeinfo);
  hints->caps = FI_MSG | FI_RMA;
  hints->mode = FI_CONTEXT | FI_CONTEXT2;
  hints->ep_attr->type = FI_EP_RDM;
  hints->domain_attr->mr_mode = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY | FI_MR_ENDPOINT;
  hints->domain_attr->threading = FI_THREAD_DOMAIN;
  hints->fabric_attr->prov_name = ::strdup(provider.c_str());
  fi_info* info = nullptr;
  const int rc = fi_getinfo(kVersion, node.empty() ? nullptr : node.c_str(), nullptr, node.empty() ? 0 : FI_SOURCE,
                            hints.get(), &info);
  if (rc != 0) throw FabricError("fi_getinfo(" + provider + ", " + node + ")", -rc, fi_strerror(-rc));
  return info;
}

// FI_RMA may be missing. Nothing is sent here, so all other completions are of our own writes.
bool is_arrival(const fi_cq_data_entry& entry) {
  return (entry.flags & FI_REMOTE_CQ_DATA) != 0 && (entry.flags & FI_WRITE) == 0;
}

[[noreturn]] void throw_completion_error(fid_cq* queue) {
  fi_cq_err_entry error{};
  check("fi_cq_readerr", fi_cq_readerr(queue, &error, 0));
  const int code = error.err != 0 ? error.err : FI_EIO;
  std::string text = fi_strerror(code);
  std::array<char, 256> detail{};
  const char* told = fi_cq_strerror(queue, error.prov_errno, error.err_data, detail.data(), detail.size());
  if (told != nullptr && text != told) text += std::string(" (") + told + ")";
  throw FabricError("fi_writedata", code, text);
}

}  // namespace

WriteLoop::WriteLoop(const std::string& provider, const std::string& node, int memory_fd, std::size_t length)
    : memory_(memory_fd, length) {
  if (length < sizeof(std::uint64_t)) throw InputError("length", "must be at least 8 bytes");
  const SignalHandlers handlers;  // put back at the end: providers install their own
  info_.reset(ask(provider, node));
  open();
  register_memory();
  set_window(kFewWindow);
}

void WriteLoop::open() {
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
  cq_attr.format = FI_CQ_FORMAT_DATA;
  cq_attr.size = kQueueSize;
  cq_attr.wait_obj = FI_WAIT_NONE;
  fid_cq* queue = nullptr;
  check("fi_cq_open", fi_cq_open(domain, &cq_attr, &queue, nullptr));
  queue_.reset(queue);
  fid_ep* endpoint = nullptr;
  check("fi_endpoint", fi_endpoint(domain, info_.get(), &endpoint, nullptr));
  endpoint_.reset(endpoint);
  check("fi_ep_bind(av)", fi_ep_bind(endpoint, &addresses->fid, 0));
  check("fi_ep_bind(cq)", fi_ep_bind(endpoint, &queue->fid, FI_TRANSMIT | FI_RECV));
  check("fi_enable", fi_enable(endpoint));
}

void WriteLoop::register_memory() {
  // Where the provider does not choose the key, ours is random: it outlives the process on the wire.
  const std::size_t key_size = info_->domain_attr->mr_key_size;
  std::random_device random;
  std::uint64_t key = std::uint64_t{random()} << 32 | random();
  if (key_size < sizeof key) key &= (std::uint64_t{1} << (8 * key_size)) - 1;
  fid_mr* registration = nullptr;
  check("fi_mr_reg", fi_mr_reg(domain_.get(), memory_.data(), memory_.length(), FI_WRITE | FI_REMOTE_WRITE, 0, key, 0,
                               &registration, nullptr));
  registration_.reset(registration);
  if ((info_->domain_attr->mr_mode & FI_MR_ENDPOINT) != 0) {
    check("fi_mr_bind", fi_mr_bind(registration, &endpoint_->fid, 0));
    check("fi_mr_enable", fi_mr_enable(registration));
  }
  descriptor_ = fi_mr_desc(registration);
}

Target WriteLoop::target() const {
  std::array<char, 512> name{};
  std::size_t length = name.size();
  check("fi_getname", fi_getname(&endpoint_->fid, name.data(), &length));
  const bool is_virtual = (info_->domain_attr->mr_mode & FI_MR_VIRT_ADDR) != 0;
  return {.address = std::string(name.data(), length),
          .base = is_virtual ? reinterpret_cast<std::uint64_t>(memory_.data()) : 0,
          .key = fi_mr_key(registration_.get()),
          .length = memory_.length()};
}

void WriteLoop::connect(const Target& peer) {
  const bool fits = peer.address.size() == target().address.size();
  if (!fits || fi_av_insert(addresses_.get(), peer.address.data(), 1, &to_, 0, nullptr) != 1)
    throw InputError("address", std::string("not an address of ") + info_->fabric_attr->prov_name);
  if (peer.length < sizeof(std::uint64_t)) throw InputError("length", "must be at least 8 bytes");
  peer_ = peer;
}

void WriteLoop::require_peer() const {
  if (to_ == FI_ADDR_UNSPEC) throw InputError("peer", "must be connected first");
}

void WriteLoop::set_window(std::size_t window) {
  contexts_.assign(window, fi_context2{});
  free_.clear();
  for (fi_context2& context : contexts_) free_.push_back(&context);
}

// False where the window or the provider's queue is full.
bool WriteLoop::try_write(std::size_t src, std::size_t dst, std::size_t length) {
  if (free_.empty()) return false;
  const long rc = fi_writedata(endpoint_.get(), memory_.data() + src, length, descriptor_, 0, to_, peer_.base + dst,
                               peer_.key, free_.back());
  if (rc == -FI_EAGAIN) return false;
  check("fi_writedata", rc);
  free_.pop_back();
  return true;
}

// Connections are made while completions are read, so the first write takes many tries.
void WriteLoop::write(std::size_t src, std::size_t dst, std::size_t length) {
  while (!try_write(src, dst, length)) poll();
}

void WriteLoop::poll() {
  std::array<fi_cq_data_entry, kBatch> entries;
  const long count = fi_cq_read(queue_.get(), entries.data(), entries.size());
  if (count == -FI_EAGAIN) return;
  if (count == -FI_EAVAIL) throw_completion_error(queue_.get());
  check("fi_cq_read", count);
  for (std::size_t i = 0; i < static_cast<std::size_t>(count); ++i) {
    if (is_arrival(entries[i]))
      ++num_arrivals_;
    else
      free_.push_back(static_cast<fi_context2*>(entries[i].op_context));
  }
}

void WriteLoop::take_arrivals(std::size_t count) {
  while (num_arrivals_ < count) poll();
  num_arrivals_ -= count;
}

// What was posted has left, so that the provider needs no more turns for it.
void WriteLoop::drain() {
  while (free_.size() < contexts_.size()) poll();
}

Spent WriteLoop::send(std::span<const std::int64_t> src_offsets, std::span<const std::int64_t> dst_offsets,
                      std::size_t page_bytes, std::size_t window) {
  require_peer();
  const Offsets src = to_offsets("src_offsets", src_offsets, page_bytes, memory_.length());
  const Offsets dst = to_offsets("dst_offsets", dst_offsets, page_bytes, peer_.length);
  if (src.size() != dst.size()) throw InputError("dst_offsets", "must be as many as src_offsets");
  if (window < 1 || window > kQueueSize)
    throw InputError("window", "must be in [1, " + std::to_string(kQueueSize) + "]");
  set_window(window);
  take_arrivals(1);
  const Stopwatch watch;
  for (std::size_t next = 0; next < src.size();) {
    while (next < src.size() && try_write(src[next], dst[next], page_bytes)) ++next;
    poll();
  }
  drain();
  take_arrivals(1);
  return watch.read();
}

Spent WriteLoop::receive(std::size_t num_pages) {
  require_peer();
  write(0, 0, 0);
  drain();
  const Stopwatch watch;
  take_arrivals(num_pages);
  const Spent spent = watch.read();
  write(0, 0, 0);
  drain();
  return spent;
}

std::vector<std::uint64_t> WriteLoop::ping(std::size_t num_rounds, std::uint64_t pause_ns) {
  require_peer();
  set_window(kFewWindow);
  auto times = time_rounds(num_rounds, pause_ns, [this] {
    write(0, 0, sizeof(std::uint64_t));
    take_arrivals(1);
  });
  drain();
  return times;
}

void WriteLoop::pong(std::size_t num_rounds) {
  require_peer();
  set_window(kFewWindow);
  answer_rounds(num_rounds, [this] {
    take_arrivals(1);
    write(0, 0, sizeof(std::uint64_t));
  });
  drain();
}

}  // namespace headrace::fabric::limits
