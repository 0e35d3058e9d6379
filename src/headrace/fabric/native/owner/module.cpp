// The Python face of the owner. Every call that waits for the owner does so without the GIL; `raise_layers` keeps it,
// because letting go of it would cost more than the call. _native.pyi is the contract.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "errors.h"
#include "memory/cuda.h"
#include "owner/convert.h"
#include "owner/owner.h"

namespace headrace::fabric {
namespace nb = nanobind;
using namespace nb::literals;
namespace {

using Providers = std::vector<std::pair<std::string, std::vector<std::pair<std::string, std::int64_t>>>>;

// As Python gives it.
struct Setup {
  std::string control;
  std::string shm;
  std::string watch;
  double silence_s = 2.0;
  std::vector<int> cpus;
  std::optional<int> cuda_device;
  Providers providers;
};

class Engine {
 public:
  Engine(int memory_fd, std::int64_t length, const Setup& setup, const Engine* beside) {
    const auto bytes = static_cast<std::size_t>(within("length", length, 1));
    Transports transports{.control = setup.control,
                          .shm = setup.shm,
                          .watch = setup.watch,
                          .silence_ns = static_cast<std::uint64_t>(setup.silence_s * 1e9),
                          .cpus = setup.cpus};
    if (setup.cuda_device) transports.device = std::make_shared<CudaDevice>(*setup.cuda_device);
    for (const auto& [provider, places] : setup.providers) {
      std::vector<Local> locals;
      for (const auto& [node, port] : places) {
        locals.push_back({node, static_cast<std::uint16_t>(within("port", port, 0, 65535))});
        if (node.empty() && port != 0) throw InputError("port", "needs a node to be bound on");
      }
      transports.providers.emplace_back(provider, std::move(locals));
    }
    const std::shared_ptr<Owner> other = beside != nullptr ? beside->open() : nullptr;
    const nb::gil_scoped_release unlocked;
    owner_ = std::make_shared<Owner>(memory_fd, bytes, transports, other.get());
  }

  // Runs `act` on the owner without the GIL. The owner lives until the last call has left it.
  template <class Act>
  auto with(Act act) {
    const auto owner = open();
    const nb::gil_scoped_release unlocked;
    return act(*owner);
  }

  const std::shared_ptr<Owner>& open() const {
    if (!owner_) throw Closed();
    return owner_;
  }

  void close() {
    const auto owner = std::exchange(owner_, nullptr);
    if (!owner) return;
    const nb::gil_scoped_release unlocked;
    owner->stop();
  }

 private:
  std::shared_ptr<Owner> owner_;
};

nb::bytes to_bytes(const std::string& bytes) { return nb::bytes(bytes.data(), bytes.size()); }

// One uint64 array that owns its numbers.
nb::object to_array(std::vector<std::uint64_t> numbers) {
  auto* kept = new std::vector<std::uint64_t>(std::move(numbers));
  nb::capsule owner(kept, [](void* opaque) noexcept { delete static_cast<std::vector<std::uint64_t>*>(opaque); });
  return nb::ndarray<nb::numpy, std::uint64_t, nb::ndim<1>>(kept->data(), {kept->size()}, owner).cast();
}

struct Tell {
  nb::object sink;
  void operator()(const MessageReceived& event) const { sink.attr("message_received")(to_bytes(event.message)); }
  void operator()(const SendFailed& event) const { sink.attr("send_failed")(event.peer, event.code, event.text); }
  void operator()(const Reached& event) const { sink.attr("reached")(event.imm, event.arrivals, event.at_ns); }
  void operator()(const Surplus& event) const { sink.attr("surplus")(event.imm, event.arrivals, event.armed); }
  void operator()(const TransferDone& event) const {
    sink.attr("transfer_done")("transfer"_a = event.transfer, "num_posted"_a = event.num_posted,
                               "num_failed"_a = event.num_failed, "complete"_a = event.complete, "code"_a = event.code,
                               "text"_a = event.text);
  }
  void operator()(const PeerLost& event) const { sink.attr("peer_lost")(event.peer, event.code, event.text); }
  void operator()(const PeerSilent& event) const { sink.attr("peer_silent")(event.peer); }
  void operator()(const PeerHeard& event) const { sink.attr("peer_heard")(event.peer); }
  void operator()(const Revoked& event) const { sink.attr("revoked")(event.peer); }
  void operator()(DigestsReady& event) const {
    sink.attr("digests_ready")(event.digest, to_array(std::move(event.digests)));
  }
};

void drain(Engine& engine, nb::object sink) {
  auto events = engine.with([](Owner& owner) { return owner.drain(); });
  const Tell tell{std::move(sink)};
  for (Event& event : events) std::visit(tell, event);
}

nb::tuple grant(Engine& engine, std::uint64_t peer) {
  const auto descriptor = engine.with([peer](Owner& owner) { return owner.grant(peer); });
  const std::string addressing(kAddressings[static_cast<std::size_t>(descriptor.addressing)]);
  return nb::make_tuple(addressing, descriptor.base, descriptor.length, nb::tuple(nb::cast(descriptor.keys)),
                        descriptor.generation);
}

void submit_program(Engine& engine, std::int64_t step, nb::sequence writes, nb::sequence last) {
  constexpr std::int64_t kMaxStep = kMaxInt / static_cast<std::int64_t>(kLayersPerStep) - 1;
  Owner::ProgramWrites parts;
  for (nb::handle entry : writes)
    parts.emplace_back(nb::cast<std::uint64_t>(entry[nb::int_(0)]), to_page_writes(entry[nb::int_(1)]));
  std::vector<Owner::GatedLast> lasts;
  for (nb::handle entry : last) {
    const auto layers = nb::cast<std::int64_t>(entry[nb::int_(1)]);
    lasts.push_back({.transfer = nb::cast<std::uint64_t>(entry[nb::int_(0)]),
                     .num_layers = static_cast<std::uint32_t>(within("last.num_layers", layers, 0, kLayersPerStep)),
                     .last = to_last_write(entry[nb::int_(2)])});
  }
  const auto number = static_cast<std::uint64_t>(within("step", step, 0, kMaxStep));
  engine.with([&](Owner& owner) { owner.submit_program(number, std::move(parts), std::move(lasts)); });
}

nb::dict fail_step(Engine& engine, std::int64_t step) {
  const auto closed = engine.with([step](Owner& owner) { return owner.fail_step(static_cast<std::uint64_t>(step)); });
  nb::dict num_posted;
  for (const auto& [transfer, count] : closed) num_posted[nb::int_(transfer)] = nb::int_(count);
  return num_posted;
}

std::uint64_t submit_digest(Engine& engine, nb::sequence reads, std::int64_t num_pages) {
  std::vector<PageWrites> parts;
  for (nb::handle part : reads) parts.push_back(to_page_reads(part));
  const auto pages = static_cast<std::uint64_t>(within("num_pages", num_pages, 0));
  return engine.with([&](Owner& owner) { return owner.submit_digest(std::move(parts), pages); });
}

void submit_last(Engine& engine, std::uint64_t transfer, nb::object last) {
  std::optional<LastWrite> aux;
  if (!last.is_none()) aux = to_last_write(last);
  engine.with([&](Owner& owner) { owner.submit_last(transfer, aux); });
}

nb::dict statistics(Engine& engine) {
  const Statistics now = engine.with([](Owner& owner) { return owner.statistics(); });
  nb::dict counts;
  counts["num_peers_now"] = now.num_peers_now;
  counts["num_transfers_now"] = now.num_transfers_now;
  counts["num_counters_now"] = now.num_counters_now;
  counts["num_writes_posted"] = now.num_writes_posted;
  counts["num_writes_completed"] = now.num_writes_completed;
  counts["num_writes_failed"] = now.num_writes_failed;
  counts["num_bytes_posted"] = now.num_bytes_posted;
  counts["num_arrivals"] = now.num_arrivals;
  counts["num_surplus"] = now.num_surplus;
  counts["num_messages_sent"] = now.num_messages_sent;
  counts["num_messages_received"] = now.num_messages_received;
  return counts;
}

void define_traits(nb::module_& module) {
  nb::class_<Traits>(module, "Traits")
      .def_ro("provider", &Traits::provider)
      .def_ro("virtual_addressing", &Traits::virtual_addressing)
      .def_ro("provider_keys", &Traits::provider_keys)
      .def_ro("local_registration", &Traits::local_registration)
      .def_ro("endpoint_registration", &Traits::endpoint_registration)
      .def_ro("ordered_messages", &Traits::ordered_messages)
      .def_ro("emulated_writes", &Traits::emulated_writes)
      .def_ro("lasting_regions", &Traits::lasting_regions)
      .def_ro("mr_key_size", &Traits::mr_key_size)
      .def_ro("cq_data_size", &Traits::cq_data_size)
      .def_ro("inject_size", &Traits::inject_size)
      .def_ro("iov_limit", &Traits::iov_limit)
      .def_ro("rma_iov_limit", &Traits::rma_iov_limit)
      .def_ro("tx_size", &Traits::tx_size)
      .def_ro("rx_size", &Traits::rx_size)
      .def_ro("max_message", &Traits::max_message)
      .def_ro("wait_fd", &Traits::wait_fd);
}

// Without an endpoint, so that what is asked of NICs that this machine lacks can be looked at.
void define_providers(nb::module_& module) {
  nb::class_<Asked>(module, "Asked")
      .def_prop_ro("api", [](const Asked& asked) { return nb::make_tuple(FI_MAJOR(asked.api), FI_MINOR(asked.api)); })
      .def_prop_ro("device_memory", [](const Asked& asked) { return (asked.caps & FI_HMEM) != 0; })
      .def_prop_ro("local_peers", [](const Asked& asked) { return (asked.caps & FI_REMOTE_COMM) == 0; })
      .def_ro("address", &Asked::address)
      .def_ro("port", &Asked::port)
      .def_ro("domain", &Asked::domain);
  module.def(
      "plan_ask",
      [](const std::string& provider, const std::string& node, std::uint16_t port, bool on_device) {
        return plan_ask(provider, {.node = node, .port = port}, on_device);
      },
      "provider"_a, "node"_a, "port"_a, "on_device"_a);
  module.def(
      "require_traits",
      [](const std::string& provider, std::uint64_t cq_data_size, bool ordered_messages, bool emulated_writes,
         bool local_registration, bool lasting_regions) {
        require_traits({.provider = provider,
                        .local_registration = local_registration,
                        .ordered_messages = ordered_messages,
                        .emulated_writes = emulated_writes,
                        .lasting_regions = lasting_regions,
                        .cq_data_size = cq_data_size});
      },
      nb::kw_only(), "provider"_a, "cq_data_size"_a, "ordered_messages"_a, "emulated_writes"_a, "local_registration"_a,
      "lasting_regions"_a);
  module.def("has_provider", &has_provider, "provider"_a);
}

void define_cuda(nb::module_& module) {
  nb::class_<CudaMemory>(module, "CudaMemory")
      .def(
          "__init__",
          [](CudaMemory* made, int device, std::int64_t num_bytes) {
            new (made) CudaMemory(device, static_cast<std::size_t>(within("num_bytes", num_bytes, 1)));
          },
          "device"_a, "num_bytes"_a)
      .def_prop_ro("fd", &CudaMemory::handle)
      .def_prop_ro("address", [](const CudaMemory& self) { return reinterpret_cast<std::uintptr_t>(self.data()); })
      .def_prop_ro("num_bytes", &CudaMemory::length)
      .def("close", &CudaMemory::close);
}

void define_peers(nb::class_<Engine>& engine) {
  engine.def_prop_ro("address", [](Engine& self) { return to_bytes(self.open()->address()); })
      .def_prop_ro("event_fd", [](Engine& self) { return self.open()->event_fd(); })
      .def_prop_ro("traits", [](Engine& self) { return self.open()->traits(); })
      .def(
          "add_peer",
          [](Engine& self, nb::bytes address) {
            const std::string name(address.c_str(), address.size());
            return self.with([&](Owner& owner) { return owner.add_peer(name); });
          },
          "address"_a)
      .def(
          "peer_at",
          [](Engine& self, nb::bytes address) {
            const std::string name(address.c_str(), address.size());
            return self.with([&](Owner& owner) { return owner.peer_at(name); });
          },
          "address"_a)
      .def(
          "remove_peer",
          [](Engine& self, std::uint64_t peer) { self.with([peer](Owner& owner) { owner.remove_peer(peer); }); },
          "peer"_a)
      .def("grant", &grant, "peer"_a)
      .def(
          "revoke",
          [](Engine& self, std::uint64_t peer) {
            return self.with([peer](Owner& owner) { return owner.revoke(peer); });
          },
          "peer"_a)
      .def(
          "transport",
          [](Engine& self, std::uint64_t peer) {
            return self.with([peer](Owner& owner) { return owner.transport(peer); });
          },
          "peer"_a)
      .def(
          "num_cuts",
          [](Engine& self, std::uint64_t peer, std::int64_t length) {
            const auto bytes = static_cast<std::uint64_t>(within("length", length, 0));
            return self.with([=](Owner& owner) { return owner.num_cuts(peer, bytes); });
          },
          "peer"_a, "length"_a)
      .def(
          "connect",
          [](Engine& self, std::uint64_t peer, nb::object descriptor) {
            const Descriptor told = to_descriptor(descriptor);
            self.with([&](Owner& owner) { owner.connect(peer, told); });
          },
          "peer"_a, "descriptor"_a)
      .def(
          "send",
          [](Engine& self, std::uint64_t peer, nb::bytes message) {
            std::string bytes(message.c_str(), message.size());
            self.with([&](Owner& owner) { owner.send(peer, std::move(bytes)); });
          },
          "peer"_a, "message"_a);
}

void define_counters(nb::class_<Engine>& engine) {
  engine
      .def(
          "arm",
          [](Engine& self, std::int64_t imm, std::int64_t expected) {
            const auto target = static_cast<std::uint64_t>(within("expected", expected, 1));
            self.with([=](Owner& owner) { owner.arm(to_imm(imm), target); });
          },
          "imm"_a, "expected"_a)
      .def(
          "retarget",
          [](Engine& self, std::int64_t imm, std::int64_t expected) {
            const auto target = static_cast<std::uint64_t>(within("expected", expected, 0));
            self.with([=](Owner& owner) { owner.retarget(to_imm(imm), target); });
          },
          "imm"_a, "expected"_a)
      .def(
          "disarm", [](Engine& self, std::int64_t imm) { self.with([=](Owner& owner) { owner.disarm(to_imm(imm)); }); },
          "imm"_a);
}

void define_writes(nb::class_<Engine>& engine) {
  engine
      .def(
          "open_transfer",
          [](Engine& self, std::uint64_t peer, std::int64_t imm, std::int64_t num_pages, double deadline_s) {
            const auto pages = static_cast<std::uint64_t>(within("num_pages", num_pages, 0));
            return self.with([=](Owner& owner) { return owner.open_transfer(peer, to_imm(imm), pages, deadline_s); });
          },
          "peer"_a, "imm"_a, "num_pages"_a, "deadline_s"_a)
      .def(
          "submit_write",
          [](Engine& self, std::uint64_t transfer, std::int64_t src_offset, std::int64_t dst_offset,
             std::int64_t length) {
            const auto bytes = static_cast<std::uint64_t>(within("length", length, 0));
            const auto src = static_cast<std::uint64_t>(src_offset);  // a negative one is beyond every memory
            const auto dst = static_cast<std::uint64_t>(dst_offset);
            self.with([=](Owner& owner) { owner.submit_write(transfer, src, dst, bytes); });
          },
          "transfer"_a, "src_offset"_a, "dst_offset"_a, "length"_a)
      .def(
          "submit_pages",
          [](Engine& self, std::uint64_t transfer, nb::object writes) {
            auto pages = to_page_writes(writes);
            self.with([&](Owner& owner) { owner.submit_pages(transfer, std::move(pages)); });
          },
          "transfer"_a, "writes"_a)
      .def("submit_last", &submit_last, "transfer"_a, "last"_a.none())
      .def("submit_program", &submit_program, "step"_a, "writes"_a, "last"_a)
      .def(
          "raise_layers",
          [](Engine& self, std::int64_t counter) {
            self.open()->raise_layers(static_cast<std::uint64_t>(within("counter", counter, 0)));
          },
          "counter"_a)
      .def("fail_step", &fail_step, "step"_a)
      .def(
          "close_transfer",
          [](Engine& self, std::uint64_t transfer) {
            return self.with([transfer](Owner& owner) { return owner.close_transfer(transfer); });
          },
          "transfer"_a)
      .def("submit_digest", &submit_digest, "reads"_a, "num_pages"_a);
}

void define_results(nb::class_<Engine>& engine) {
  engine.def("drain", &drain, "sink"_a)
      .def("statistics", &statistics)
      .def(
          "num_fragments_dropped",
          [](Engine& self) { return self.with([](Owner& owner) { return owner.statistics().num_fragments_dropped; }); })
      .def("owner_cpu_ns", [](Engine& self) { return self.with([](Owner& owner) { return owner.cpu_ns(); }); })
      .def(
          "echo",
          [](Engine& self, std::uint64_t peer, std::int64_t imm, std::int64_t reply) {
            self.with([=](Owner& owner) { owner.echo(peer, to_imm(imm), to_imm(reply)); });
          },
          "peer"_a, "imm"_a, "reply"_a)
      .def(
          "round_trips",
          [](Engine& self, std::uint64_t peer, std::int64_t imm, std::int64_t reply, std::int64_t count,
             double pause_s) {
            const auto times = static_cast<std::uint64_t>(within("count", count, 1));
            const auto pause = static_cast<std::uint64_t>(pause_s * 1e9);
            return to_array(self.with(
                [=](Owner& owner) { return owner.round_trips(peer, to_imm(imm), to_imm(reply), times, pause); }));
          },
          "peer"_a, "imm"_a, "reply"_a, "count"_a, "pause_s"_a)
      .def("close", &Engine::close);
}

// The classes of headrace.errors are looked up at each raise: rare, and no reference outlives the interpreter.
void raise_as(const char* name, nb::object arguments) {
  const nb::object kind = nb::module_::import_("headrace.errors").attr(name);
  const nb::object error = kind(*nb::borrow<nb::tuple>(arguments));
  PyErr_SetObject(kind.ptr(), error.ptr());
}

void translate(const std::exception_ptr& thrown, void*) {
  try {
    std::rethrow_exception(thrown);
  } catch (const InputError& error) {
    raise_as("InputError", nb::make_tuple(error.field, error.what()));
  } catch (const FabricError& error) {
    raise_as("FabricError", nb::make_tuple(error.call, error.code, error.what()));
  } catch (const Closed& error) {
    raise_as("Closed", nb::make_tuple(error.what()));
  }
}

}  // namespace

NB_MODULE(_native, module) {
  nb::register_exception_translator(&translate);
  define_traits(module);
  define_providers(module);
  define_cuda(module);
  nb::class_<Setup>(module, "Setup")
      .def(
          "__init__",
          [](Setup* made, std::string control, std::string shm, std::string watch, double silence_s,
             std::vector<int> cpus, std::optional<int> cuda_device, Providers providers) {
            new (made) Setup{std::move(control), std::move(shm), std::move(watch),    silence_s,
                             std::move(cpus),    cuda_device,    std::move(providers)};
          },
          nb::kw_only(), "control"_a, "shm"_a, "watch"_a, "silence_s"_a, "cpus"_a, "cuda_device"_a.none(),
          "providers"_a);
  nb::class_<Engine> engine(module, "Engine");
  engine.def(nb::init<int, std::int64_t, const Setup&, const Engine*>(), "memory_fd"_a, "length"_a, "setup"_a,
             "beside"_a.none());
  define_peers(engine);
  define_counters(engine);
  define_writes(engine);
  define_results(engine);
}

}  // namespace headrace::fabric
