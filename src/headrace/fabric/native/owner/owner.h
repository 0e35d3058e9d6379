// The owner: one thread that owns the endpoint and every table beside it, while it is awake. Calls from other threads
// become commands it runs between its turns; where it sleeps, the caller takes its place for the length of the command,
// since waking it takes ten times as long. `raise_layers` alone goes past both. It runs no Python, so no GIL can delay
// it.
//
// A turn is bounded work: some commands, one batch of completions and of what came over lanes, messages then writes
// peer by peer, one slice of digests. Without work it spins for at most 20 us and then sleeps on the completion queues
// and the bell.
#pragma once

#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <future>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "address.h"
#include "control/watch.h"
#include "events.h"
#include "fds.h"
#include "link.h"
#include "memory/memory.h"
#include "messages.h"
#include "near/neighbours.h"
#include "nics/endpoint.h"
#include "nics/rails.h"
#include "owner/counters.h"
#include "owner/digest.h"
#include "owner/wake.h"
#include "transfers.h"

namespace headrace::fabric {

// Where and how peers may reach us, and where our thread runs.
struct Transports {
  std::string control;                   // name of our local control socket; empty: our memory is not mapped by others
  std::string shm;                       // likewise, of that of libfabric's shm
  std::string watch;                     // where to listen for TCP control connections, "host:port"; empty: nowhere
  std::uint64_t silence_ns = 0;          // after which a peer is told silent
  std::vector<int> cpus;                 // empty: wherever the scheduler puts it
  std::shared_ptr<CudaDevice> device{};  // whose memory it is; none: the host's
  std::vector<std::pair<std::string, std::vector<Local>>> providers{};  // by preference; one endpoint for each Local
};

struct Statistics {
  std::uint64_t num_peers_now = 0;
  std::uint64_t num_transfers_now = 0;
  std::uint64_t num_counters_now = 0;
  std::uint64_t num_writes_posted = 0;
  std::uint64_t num_writes_completed = 0;
  std::uint64_t num_writes_failed = 0;
  std::uint64_t num_bytes_posted = 0;
  std::uint64_t num_arrivals = 0;
  std::uint64_t num_surplus = 0;
  std::uint64_t num_messages_sent = 0;
  std::uint64_t num_messages_received = 0;
  std::uint64_t num_fragments_dropped = 0;
};

class Owner {
 public:
  using ProgramWrites = std::vector<std::pair<std::uint64_t, PageWrites>>;
  struct GatedLast {
    std::uint64_t transfer;
    std::uint32_t num_layers;
    LastWrite last;
  };

  // `beside`: another device of this process, with whose counters this one counts; their events are told there.
  Owner(int memory_fd, std::size_t length, const Transports& transports, const Owner* beside);
  ~Owner();

  // From any thread. Each waits for the owner's turn and throws InputError, FabricError or Closed.
  std::uint64_t add_peer(const std::string& address);
  std::optional<std::uint64_t> peer_at(const std::string& address);
  void remove_peer(std::uint64_t peer);
  std::string transport(std::uint64_t peer);
  std::uint64_t num_cuts(std::uint64_t peer, std::uint64_t length);
  Descriptor grant(std::uint64_t peer);
  bool revoke(std::uint64_t peer);
  void connect(std::uint64_t peer, const Descriptor& descriptor);
  void send(std::uint64_t peer, std::string message);
  void arm(std::uint32_t imm, std::uint64_t expected);
  void retarget(std::uint32_t imm, std::uint64_t expected);
  void disarm(std::uint32_t imm);
  std::uint64_t open_transfer(std::uint64_t peer, std::uint32_t imm, std::uint64_t num_pages, double deadline_s);
  void submit_pages(std::uint64_t transfer, PageWrites writes);
  void submit_write(std::uint64_t transfer, std::uint64_t src, std::uint64_t dst, std::uint64_t length);
  void submit_last(std::uint64_t transfer, std::optional<LastWrite> last);
  void submit_program(std::uint64_t step, ProgramWrites writes, std::vector<GatedLast> lasts);
  std::vector<std::pair<std::uint64_t, std::uint64_t>> fail_step(std::uint64_t step);
  std::uint64_t close_transfer(std::uint64_t transfer);
  std::uint64_t submit_digest(std::vector<PageWrites> reads, std::uint64_t num_pages);
  // Answers every arrival of `imm` with a write to `peer` that carries `reply`; and plays against such a wall, `count`
  // times with a pause in between, from the write until its answer is seen, in ns.
  void echo(std::uint64_t peer, std::uint32_t imm, std::uint32_t reply);
  std::vector<std::uint64_t> round_trips(std::uint64_t peer, std::uint32_t imm, std::uint32_t reply,
                                         std::uint64_t count, std::uint64_t pause_ns);
  Statistics statistics();
  std::uint64_t cpu_ns();  // spent by the owner thread so far
  std::vector<Event> drain();
  void stop();

  // These never wait.
  void raise_layers(std::uint64_t counter) { bell_.raise(counter); }
  const std::string& address() const { return address_; }
  const std::vector<Traits>& traits() const { return traits_; }  // of the providers
  int event_fd() const { return events_->fd(); }

 private:
  static constexpr std::uint64_t kSendWindow = 16;
  // What waits for a peer that takes nothing: above this a message fails at once.
  static constexpr std::size_t kMaxQueuedBytes = 4 * kMaxMessage;

  struct Peer {
    std::string route;  // what tells it from the others
    std::unique_ptr<Link> link;
    std::uint64_t window = 0;
    std::optional<Target> target;
    WriteQueue writes;
    std::deque<std::shared_ptr<OutgoingMessage>> messages;
    std::size_t num_queued_bytes = 0;  // of `messages`
    std::uint64_t num_writes_outstanding = 0;
    std::uint64_t num_sends_outstanding = 0;
    unsigned num_refusals = 0;       // EAGAIN in a row
    std::uint64_t parked_until = 0;  // 0: not parked
    bool may_retry = false;          // parked, but something moved since
    bool refused = false;            // in this turn

    // Where writes complete later, so many may be under way; 0: where they are copied at once.
    std::size_t room() const {
      if (window == 0) return std::numeric_limits<std::size_t>::max();
      return window > num_writes_outstanding ? window - num_writes_outstanding : 0;
    }
    void unqueue(const std::shared_ptr<OutgoingMessage>& message) {
      if (std::erase(messages, message) > 0) num_queued_bytes -= message->cost();
    }
  };

  // Done by the owner, or instead of it. `ask`: that leaves it nothing to do, and it sleeps on; `call`: it is woken;
  // `post`: what was queued by it is posted too, where it is little.
  template <class Act>
  auto ask(Act act);
  template <class Act>
  auto call(Act act);
  template <class Act>
  void post(Act act);
  template <class Act>
  auto wait_for(Act act);
  bool admit();         // throws where nobody is there to be called. -> no command waits
  void refuse() const;  // likewise, with mutex_ held
  void push(std::function<void()> command);
  void queue(std::function<void()> command);  // with mutex_ held
  void forget_told();
  void forget(const std::vector<std::uint64_t>& told);

  // owner.cpp (the loop) and progress.cpp
  void run();
  bool turn();
  bool run_commands();
  bool read_all();
  bool read_completions();
  bool read_lanes();
  bool post_all();
  bool post_little();
  bool post_messages(std::uint64_t id, Peer& peer);
  bool post_writes(std::uint64_t id, Peer& peer);
  bool hash_some();
  void open_lasts();
  void sleep();
  bool may_sleep(std::uint64_t gate);
  void shut_down();
  bool forked() const;
  void leave_to_parent();
  void give_all_up(const std::string& why);

  void complete(Completion& completion, std::uint64_t now);
  void complete_write(Op& op, const Completion& completion);
  void complete_send(Op& op, const Completion& completion);
  void complete_receive(const Completion& completion);
  void receive(std::span<const std::byte> fragment);
  void posted(std::span<const Write> run, Peer& peer);
  bool may_post(Peer& peer, std::uint64_t now) const;
  void park(Peer& peer);
  void share_windows();

  // probe.cpp
  struct Ball {
    std::shared_ptr<Transfer> transfer;
    Write write;
  };
  struct Echo {
    Ball ball;
    std::uint64_t owed = 0;
  };
  struct Rally {
    Ball ball;
    std::uint32_t reply = 0;
    std::uint64_t left = 0;
    std::uint64_t pause = 0;
    std::shared_ptr<std::promise<std::vector<std::uint64_t>>> done;
    std::vector<std::uint64_t> times;
    std::uint64_t sent_at = 0;  // 0: it is our turn
    std::uint64_t next_at = 0;
  };
  Ball serve(std::uint64_t peer, std::uint32_t imm);
  bool probed(std::uint32_t imm, std::uint64_t now);
  bool play();
  bool hit(const Ball& ball);
  void arrived(std::uint32_t imm, std::uint64_t count, std::uint64_t now) {
    if (rally_ || !echoes_.empty())
      while (count > 0 && probed(imm, now)) --count;
    counters_->arrived(imm, count, now);
  }

  // commands.cpp and lists.cpp: the tables
  Peer& peer_of(std::uint64_t peer);
  struct Way {
    std::string route;
    std::function<std::unique_ptr<Link>(std::uint64_t peer)> link;
  };
  std::optional<Way> way_to(const Address& theirs);
  std::optional<std::uint64_t> peer_by(const std::string& route) const;
  std::uint64_t cuts(const Peer& peer, std::uint64_t length) const;
  PeerNews peer_news();
  void meet_neighbours(const Transports& transports);
  void peer_lost(std::uint64_t peer, int code, const std::string& text);
  void end_late(std::uint64_t now);
  const std::shared_ptr<Transfer>& transfer_of(std::uint64_t transfer);
  const std::shared_ptr<Transfer>& open_list(std::uint64_t transfer);
  void check_digests(std::uint64_t num_pages) const;
  void check_source(const PageWrites& writes, const std::string& field) const;
  void check_last(const Transfer& transfer, const LastWrite& last) const;
  bool check_target(Transfer& transfer, const PageWrites& writes);
  bool check_target(Transfer& transfer, const LastWrite& last);
  void queue_program(std::uint64_t step, std::vector<Part> parts, const std::vector<GatedLast>& lasts);
  void queue_writes(const std::shared_ptr<Transfer>& list, PageWrites writes);
  void give_up(Transfer& transfer);
  void settle(Transfer& transfer);

  const pid_t process_ = ::getpid();
  std::mutex turn_;  // who has it is the owner: our thread, except while it sleeps. Taken before mutex_
  const bool on_device_;
  Fd memory_fd_;
  Mapping memory_;
  const std::uint64_t sender_;
  const std::shared_ptr<EventQueue> events_ = std::make_shared<EventQueue>();
  Doorbell bell_;
  std::mutex mutex_;  // commands_, stopping_, failure_, told_
  std::vector<std::function<void()>> commands_;
  bool stopping_ = false;
  std::exception_ptr failure_;
  std::vector<std::uint64_t> told_;  // transfers whose end was drained: their ids end before the next command
  std::atomic<bool> has_commands_{false};
  std::vector<std::unique_ptr<Rails>> rails_;            // by preference
  std::vector<std::unique_ptr<Neighbours>> neighbours_;  // likewise, and before those
  std::unique_ptr<Watch> watch_;
  Address own_;
  std::string address_;
  std::vector<Traits> traits_;

  const std::shared_ptr<ImmCounters> counters_;
  Digester digester_;
  MessageAssembler assembler_;
  std::map<std::uint64_t, Peer> peers_;
  std::unordered_map<std::uint64_t, std::shared_ptr<Transfer>> transfers_;
  std::multimap<std::uint64_t, std::uint64_t> deadlines_;  // -> transfer, which may be over
  std::map<std::uint64_t, std::vector<std::uint64_t>> steps_;
  std::map<std::uint32_t, Echo> echoes_;
  std::optional<Rally> rally_;
  Statistics statistics_;
  std::uint64_t next_peer_ = 1;
  std::uint64_t next_transfer_ = 1;
  std::uint64_t next_digest_ = 1;
  std::uint64_t next_message_ = 0;
  std::uint32_t num_grants_ = 0;
  std::uint64_t num_transfers_ = 0;
  std::uint64_t last_step_ = 0;
  bool any_step_ = false;
  std::uint64_t first_peer_ = 0;  // where the next round robin begins
  std::uint64_t layers_seen_ = 0;
  bool look_again_ = false;  // a program came: some of its layers may be computed already
  std::uint64_t busy_at_ = 0;
  std::uint64_t num_idle_turns_ = 0;
  std::vector<Completion> completions_;

  std::thread thread_;
};

template <class Act>
auto Owner::call(Act act) {
  struct Knock {
    Doorbell& bell;
    ~Knock() { bell.knock(); }
  } const knock{bell_};
  return ask(std::move(act));
}

template <class Act>
void Owner::post(Act act) {
  const bool more = ask([this, act = std::move(act)]() mutable {
    act();
    return !post_little();
  });
  if (more) bell_.knock();
}

template <class Act>
auto Owner::ask(Act act) {
  if (forked()) throw Closed();  // nobody would answer
  if (std::unique_lock turn(turn_, std::try_to_lock); turn && admit()) {
    forget_told();
    return act();
  }
  return wait_for(std::move(act));
}

template <class Act>
auto Owner::wait_for(Act act) {
  using Result = std::invoke_result_t<Act>;
  // Shared: the owner may still be leaving the task when its answer is already here.
  auto task = std::make_shared<std::packaged_task<Result()>>(std::move(act));
  auto answer = task->get_future();
  push([task] { (*task)(); });
  task.reset();
  try {
    return answer.get();
  } catch (const std::future_error&) {
    throw Closed();  // stopped before the command's turn came
  }
}

}  // namespace headrace::fabric
