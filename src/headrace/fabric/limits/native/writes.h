// The bare libfabric loop: one endpoint, one registered memory, one peer; writes with an imm on each, as many under way
// as a window allows, completions read by polling. Owns every fi_* object. Knows no requests, counters or recovery:
// what fails throws, and the process is of no use afterwards. One thread in each of the two processes.
#pragma once

#include <rdma/fabric.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "region.h"
#include "spent.h"

namespace headrace::fabric::limits {

// What one side tells the other before anything can be written.
struct Target {
  std::string address;
  std::uint64_t base = 0;  // of the memory's first byte, as writes name it
  std::uint64_t key = 0;
  std::size_t length = 0;
};

class WriteLoop {
 public:
  // `node` is the local address to bind to, or an endpoint name for providers that have names; empty is the provider's
  // choice.
  WriteLoop(const std::string& provider, const std::string& node, int memory_fd, std::size_t length);

  Target target() const;
  void connect(const Target& peer);

  // From when the receiver says that it is there to when it says that it has seen every imm.
  Spent send(std::span<const std::int64_t> src_offsets, std::span<const std::int64_t> dst_offsets,
             std::size_t page_bytes, std::size_t window);
  Spent receive(std::size_t num_pages);

  // The first eight bytes of the memory there and back. See time_rounds.
  std::vector<std::uint64_t> ping(std::size_t num_rounds, std::uint64_t pause_ns);
  void pong(std::size_t num_rounds);

 private:
  struct CloseFid {
    template <class Fid>
    void operator()(Fid* opened) const {
      fi_close(&opened->fid);
    }
  };
  template <class Fid>
  using Opened = std::unique_ptr<Fid, CloseFid>;
  struct FreeInfo {
    void operator()(fi_info* info) const { fi_freeinfo(info); }
  };

  void open();
  void register_memory();
  void require_peer() const;
  void set_window(std::size_t window);
  bool try_write(std::size_t src, std::size_t dst, std::size_t length);
  void write(std::size_t src, std::size_t dst, std::size_t length);
  void poll();
  void take_arrivals(std::size_t count);
  void drain();

  Region memory_;
  // Closed in the reverse order.
  std::unique_ptr<fi_info, FreeInfo> info_;
  Opened<fid_fabric> fabric_;
  Opened<fid_domain> domain_;
  Opened<fid_av> addresses_;
  Opened<fid_cq> queue_;
  Opened<fid_ep> endpoint_;
  Opened<fid_mr> registration_;
  void* descriptor_ = nullptr;
  Target peer_;
  fi_addr_t to_ = FI_ADDR_UNSPEC;
  std::vector<fi_context2> contexts_;
  std::vector<fi_context2*> free_;
  std::size_t num_arrivals_ = 0;  // seen, and not yet taken
};

}  // namespace headrace::fabric::limits
