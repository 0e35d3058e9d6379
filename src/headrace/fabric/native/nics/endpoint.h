// One libfabric endpoint: opened objects, traits, registrations, posts and completions. Owns every fi_* object and
// the contexts of operations in flight; knows neither peers nor transfers. Owner thread only (FI_THREAD_DOMAIN), except
// for the constructor, which may run before that thread starts.
#pragma once

#include <rdma/fabric.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "memory/cuda.h"
#include "messages.h"
#include "nics/providers.h"
#include "nics/sockets.h"
#include "transfers.h"

namespace headrace::fabric {

struct CloseFid {
  template <class Fid>
  void operator()(Fid* opened) const {
    fi_close(&opened->fid);
  }
};
template <class Fid>
using Opened = std::unique_ptr<Fid, CloseFid>;

struct Registration {
  Opened<fid_mr> region;
  std::uint64_t key = 0;
  void* descriptor() const { return region ? fi_mr_desc(region.get()) : nullptr; }
  // 0, or a negative errno: then it is open still.
  int close() {
    const int rc = region ? fi_close(&region->fid) : 0;
    if (rc == 0) region.release();
    return rc;
  }
};

struct RemotePlace {
  std::uint64_t at = 0;
  std::uint64_t key = 0;
};

enum class OpKind { write, send, receive };
// abandoned: nobody waits any more, but the provider still holds the context.
enum class OpState { free, live, abandoned };

// One operation in flight. The context is what libfabric hands back.
struct Op : fi_context2 {
  OpKind kind = OpKind::write;
  OpState state = OpState::free;
  std::uint64_t peer = 0;
  std::shared_ptr<Transfer> transfer;
  std::shared_ptr<OutgoingMessage> message;
  std::byte* buffer = nullptr;  // kFragment bytes, of sends and receives
  void* descriptor = nullptr;
};

class Endpoint;

struct Completion {
  Endpoint* endpoint = nullptr;
  Op* op = nullptr;  // null: an arrival
  std::uint32_t imm = 0;
  std::size_t length = 0;
  int code = 0;
  std::string text{};
};

// Whether an endpoint of it can be opened here.
bool has_provider(const std::string& provider);

class Endpoint {
 public:
  // `local` is the address to bind to. With a device, what is shared and sent is its memory; messages never are.
  // Providers install handlers of signals with their first endpoint: keep ours by SignalHandlers.
  Endpoint(const std::string& provider, const Local& local, std::shared_ptr<CudaDevice> device = nullptr);
  ~Endpoint();

  const Traits& traits() const { return traits_; }
  const std::string& name() const { return name_; }

  // There is no removal: fi_av_remove closes the peer's connection, and 1.17 crashes when a write of that peer is half
  // received (see hang_up). The entry stays for the endpoint's life; the same address gives the same entry again.
  fi_addr_t insert(const std::string& address);
  // By `key`, where the provider leaves that to us and it is not 0: that is a random one.
  Registration register_shared(std::byte* data, std::size_t length, std::uint64_t access, std::uint64_t key = 0);
  // What writes from here take their bytes from, where the provider wants to know.
  void register_source(std::byte* data, std::size_t length);

  // An op of that kind, taken from the pool; `recycle` gives it back (a completion's is given back by the caller).
  Op* take(OpKind kind);
  void recycle(Op* op, bool failed);
  // Writes and sends to `peer` complete for nobody from here on.
  void abandon(std::uint64_t peer);
  std::uint64_t num_abandoned() const { return num_abandoned_; }
  std::uint64_t num_taken() const { return num_taken_; }
  // Nothing that is under way will complete any more: each with this code and text, to be recycled.
  void fail_all(int code, const std::string& text, std::vector<Completion>& completions);

  // All three return 0, -FI_EAGAIN or a negative errno; the op stays the caller's unless 0.
  long post_write(Op* op, fi_addr_t to, const std::byte* from, std::size_t length, std::uint32_t imm,
                  RemotePlace place);
  long post_send(Op* op, fi_addr_t to, std::size_t length);
  long post_receive(Op* op);

  // At most one batch. Makes the provider's progress; completions of operations given up are dropped.
  void read(std::vector<Completion>& completions);

  // Nothing where they cannot be seen.
  std::optional<std::vector<Connection>> connections() const;
  void keep_alive() const;

  int wait_fd() const { return wait_fd_; }  // -1: nothing tells of completions
  bool may_sleep();

 private:
  static constexpr std::size_t kChunk = 64;
  struct Chunk {
    std::array<Op, kChunk> ops;
    std::vector<std::byte> buffers;
    Registration registration;
  };

  Registration register_memory(const CudaDevice* device, std::byte* data, std::size_t length, std::uint64_t access,
                               std::uint64_t key = 0);
  void open(const std::string& provider, const Local& local);
  void read_traits();
  bool emulates_writes();
  void read_error(std::vector<Completion>& completions);
  bool is_tcp() const { return traits_.provider.find("tcp") != std::string::npos; }
  bool hang_up();
  void grow(OpKind kind);
  Op* claim(void* context);

  struct FreeInfo {
    void operator()(fi_info* info) const { fi_freeinfo(info); }
  };
  // Closed in the reverse order: endpoint, queue, addresses, domain, fabric.
  const std::shared_ptr<CudaDevice> device_;
  std::unique_ptr<fi_info, FreeInfo> info_;
  Opened<fid_fabric> fabric_;
  Opened<fid_domain> domain_;
  Opened<fid_av> addresses_;
  Opened<fid_cq> queue_;
  Registration source_;
  std::vector<std::unique_ptr<Chunk>> chunks_;
  Opened<fid_ep> endpoint_;
  int wait_fd_ = -1;
  Traits traits_;
  std::string name_;
  std::array<std::vector<Op*>, 3> free_;
  std::deque<Op*> retired_;
  std::uint64_t num_abandoned_ = 0;
  std::uint64_t num_taken_ = 0;
};

}  // namespace headrace::fabric
