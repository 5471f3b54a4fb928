// The session: an agent, the two ends, and the thread that serves them while the engine computes.
#include "kvtransfer/kv_session.h"

#include <poll.h>

#include <array>
#include <atomic>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kvtransfer/session/core.h"
#include "kvtransfer/session/loads.h"
#include "kvtransfer/session/sends.h"
#include "transport/base/json_depth.h"
#include "transport/base/limits/event_fd.h"
#include "transport/base/log.h"

namespace baton::kvtransfer {
namespace {

using nlohmann::json;

// How often deadlines are looked at while something is under way, and whether calls to agents are
// to be repeated.
constexpr Time kNap = std::chrono::milliseconds(20);
constexpr Time kIdleNap = std::chrono::milliseconds(100);

int milliseconds(Time time) {
  return static_cast<int>(std::chrono::ceil<std::chrono::milliseconds>(time).count());
}

// Only times are fractions in messages. Elsewhere one may be out of the range of the integer that
// is read from it, which C++ leaves undefined.
bool has_stray_fraction(const json& value, bool is_time = false) {
  if (!value.is_structured()) return value.is_number_float() && !is_time;
  for (auto it = value.begin(); it != value.end(); ++it) {
    const bool time = value.is_object() && (it.key() == "lease" || it.key() == "timeout");
    if (has_stray_fraction(*it, time)) return true;
  }
  return false;
}

}  // namespace

struct KvSession::Inside {
  explicit Inside(KvSessionOptions& options)
      : name(options.name), sends(core, options.lease, options.max_lease) {
    core.own = std::move(options.own_agent);
    core.agent = core.own != nullptr ? core.own.get() : options.agent;
    core.timeline = options.worker.timeline;
    core.may_be_read = options.may_be_read;
    core.shard = options.shard;
    core.clock = options.clock != nullptr ? options.clock : &Clock::steady();
    core.wake_thread = [this] { wake(); };
    core.wake_engine = [this] { engine_bell.ring(); };
  }

  void wake() {
    rung = true;
    const std::lock_guard lock(closing);
    if (core.agent != nullptr) core.agent->wake();
  }

  bool turn() {
    const std::lock_guard lock(turning);
    if (core.agent == nullptr) return false;  // closed
    if (!in_use) {
      (void)core.agent->has_remote("");  // it serves metadata meanwhile
      return false;
    }
    for (const AgentMessage& message : core.agent->messages()) hear(message.agent, message.payload);
    const bool sending = sends.step();
    return loads.step() || sending;
  }

  // Whatever a peer says, the thread lives.
  void hear(const std::string& sender, const std::string& text) {
    std::string why = "it is nested too deep";
    try {
      if (!base::json_too_deep(text)) {
        const json message = json::parse(text);
        const std::string kind = message.at("kind").get<std::string>();
        const bool of_decode = kind == "want" || kind == "done";
        if (!has_stray_fraction(message)) {
          return of_decode ? sends.heard(sender, message)
                           : loads.heard(sender, message, text.size());
        }
        why = "it has a fraction where an integer belongs";
      }
    } catch (const json::exception& error) {
      why = error.what();
    }
    base::log_event(base::LogLevel::kWarning, "cannot parse a message from %s: %s", sender, why);
  }

  void serve() {
    const int events = core.agent->event_fd();
    const auto called = [&] {
      const bool was_rung = rung.exchange(false);
      return base::EventFd::silence(events) || was_rung || stop;
    };
    while (!stop) {
      const Time began = Clock::steady().now();
      const bool busy = turn();
      const Time ended = Clock::steady().now();
      // Bytes do not wait for one long turn of thousands of loads after the other.
      while (core.agent->progress() && Clock::steady().now() - ended < ended - began) {
      }
      const Time nap = sends.more() ? Time::zero() : busy ? kNap : kIdleNap;
      core.agent->wait_until(called, nap).IgnoreError();
    }
  }

  const std::string name;
  std::string address;
  session::Core core;
  session::Sends sends;
  session::Loads loads{core};
  base::EventFd engine_bell;
  std::mutex turning;               // the agent stays while a caller's turn() uses it
  std::mutex closing;               // a call of another thread may ring meanwhile
  std::atomic<bool> in_use{false};  // the mover is there
  std::atomic<bool> rung{false};    // the thread has something to look at
  std::atomic<bool> stop{false};
  std::thread thread;
};

absl::StatusOr<std::unique_ptr<KvSession>> KvSession::create(KvSessionOptions options) {
  auto inside = std::make_unique<Inside>(options);
  session::Core& core = inside->core;
  if (core.agent == nullptr) {
    AgentOptions agent_options;  // named as workers of an engine are numbered
    agent_options.name = absl::StrCat(
        options.name, "/", options.shard.rank + options.shard.stage * options.shard.ranks);
    agent_options.worker = options.worker;
    agent_options.worker.listen_port = options.port;
    agent_options.serve_metadata = true;
    agent_options.serve_thread = agent_options.progress_thread = !options.start_thread;
    absl::StatusOr<std::unique_ptr<Agent>> agent = Agent::create(std::move(agent_options));
    if (!agent.ok()) return agent.status();
    core.own = *std::move(agent);
    core.agent = core.own.get();
  }
  if (core.agent->event_fd() < 0) return base::refused("eventfd", errno);
  if (!inside->engine_bell.status().ok()) return inside->engine_bell.status();
  inside->address = absl::StrCat(options.host, ":", core.agent->port());
  try {
    if (options.start_thread) inside->thread = std::thread([in = inside.get()] { in->serve(); });
  } catch (const std::system_error& no_thread) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "no thread for the session: ", no_thread.what(), "; raise `ulimit -u` or `ulimit -v`"));
  }
  return std::unique_ptr<KvSession>(new KvSession(std::move(inside)));
}

KvSession::KvSession(std::unique_ptr<Inside> inside) : inside_(std::move(inside)) {}
KvSession::KvSession(KvSession&& other) noexcept = default;
KvSession::~KvSession() { close(); }

absl::Status KvSession::use(std::unique_ptr<session::KvMover> mover) {
  if (inside_->core.mover != nullptr) {
    return absl::FailedPreconditionError("it already has a cache");
  }
  inside_->core.mover = std::move(mover);
  inside_->in_use = true;
  inside_->wake();
  return absl::OkStatus();
}

void KvSession::close() {
  if (inside_ == nullptr) return;  // it was moved from
  inside_->stop = true;
  inside_->wake();
  if (inside_->thread.joinable()) inside_->thread.join();
  {
    const std::lock_guard no_turn(inside_->turning);
    inside_->loads.stop();
    inside_->sends.stop();
    const std::lock_guard lock(inside_->closing);
    inside_->core.agent = nullptr;
  }
  inside_->core.own.reset();  // nothing reads the mover's memory afterwards
  inside_->loads.close();
  inside_->sends.close();
}

Agent* KvSession::agent() { return inside_->core.agent; }
int KvSession::event_fd() const { return inside_->engine_bell.fd(); }
WorkerStats KvSession::stats() const {
  const Agent* const agent = inside_->core.agent;
  return agent == nullptr ? WorkerStats{} : agent->stats().worker;
}
const std::string& KvSession::address() const { return inside_->address; }
bool KvSession::turn() { return inside_->turn(); }

uint64_t KvSession::open(absl::string_view transfer, size_t tokens) {
  return inside_->sends.open(transfer, tokens);
}
void KvSession::computed(uint64_t send, uint32_t layer, size_t tokens,
                         absl::Span<const uint32_t> blocks) {
  inside_->sends.computed(send, layer, 0, tokens, blocks);
}
absl::Status KvSession::save(uint64_t send, uint32_t layer, uint64_t first_block,
                             absl::Span<const uint32_t> blocks) {
  absl::Status good = inside_->core.mover->check(layer, blocks);
  if (good.ok()) inside_->sends.computed(send, layer, first_block, 0, blocks);
  return good;
}
void KvSession::restart(uint64_t send) { inside_->sends.restart(send); }
void KvSession::hold(uint64_t send) { inside_->sends.hold(send); }
void KvSession::drop(uint64_t send) { inside_->sends.drop(send); }
void KvSession::fail(uint64_t send, const absl::Status& why) { inside_->sends.fail(send, why); }
std::optional<KvAsked> KvSession::next_asked() { return inside_->sends.next_asked(); }
void KvSession::refuse(absl::string_view transfer, const absl::Status& why) {
  inside_->sends.refuse(transfer, why);
}
bool KvSession::is_wanted(uint64_t send) { return inside_->sends.is_wanted(send); }
void KvSession::expect(uint64_t send, uint32_t loads, Time lease) {
  inside_->sends.expect(send, loads, lease);
}
void KvSession::give(uint64_t send, std::string payload) {
  inside_->sends.give(send, std::move(payload));
}
std::vector<uint64_t> KvSession::released() { return inside_->sends.released(); }
std::optional<uint64_t> KvSession::next_released() { return inside_->sends.next_released(); }
KvTransfer KvSession::params_of(absl::string_view transfer) const {
  return {.transfer = std::string(transfer),
          .agent = inside_->name,
          .address = inside_->address,
          .finished = true,
          .ranks = inside_->core.shard.ranks};
}

absl::Status KvSession::start_load(KvLoad load) {
  if (inside_->core.mover == nullptr) {
    return absl::FailedPreconditionError("use_cache() comes before the first load");
  }
  if (!load.transfer.has_value()) {
    return absl::InvalidArgumentError("a load by hand-off needs the name of its transfer");
  }
  absl::StatusOr<std::vector<KvRun>> runs = inside_->core.mover->runs_of(load);
  if (!runs.ok()) return runs.status();
  KvOrder order{load.id,  *std::move(load.transfer), *std::move(runs), load.timeout, load.silence,
                load.push};
  if (load.ask) {
    order.tokens = std::move(load.tokens);
    order.lease = load.lease;
  }
  order.first_token = load.first_token;
  return inside_->loads.start(std::move(order));
}
uint32_t KvSession::layers_loaded(KvRequestId id) { return inside_->loads.layers_loaded(id); }
absl::Status KvSession::load_status(KvRequestId id) { return inside_->loads.status(id); }
bool KvSession::is_exact(KvRequestId id) { return inside_->loads.is_exact(id); }
bool KvSession::end_load(KvRequestId id) { return inside_->loads.end(id); }
absl::Status KvSession::load(KvOrder order) { return inside_->loads.start(std::move(order)); }
std::optional<KvLoaded> KvSession::next_loaded() { return inside_->loads.next_loaded(); }
absl::Status KvSession::renew_load(KvRequestId id, Time timeout) {
  return inside_->loads.renew(id, timeout);
}
absl::StatusOr<std::string> KvSession::payload(KvRequestId id) {
  return inside_->loads.payload(id);
}
std::vector<uint32_t> KvSession::failed_blocks(KvRequestId id) {
  return inside_->loads.failed_blocks(id);
}
KvConnectorStats KvSession::session_stats() {
  return {inside_->sends.bytes_written(), inside_->loads.bytes_loaded(), inside_->loads.failed(),
          inside_->sends.failed(), inside_->loads.route()};
}
void KvSession::progress() { inside_->engine_bell.silence(); }
void KvSession::wait(Time timeout, int fd) {
  std::array<pollfd, 2> entries = {pollfd{event_fd(), POLLIN, 0}, pollfd{fd, POLLIN, 0}};
  poll(entries.data(), entries.size(), milliseconds(timeout));
}

}  // namespace baton::kvtransfer
