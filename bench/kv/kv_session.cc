// The active side of `baton kv_bw`: connects to a target, posts transfers, times them.
#include "bench/kv/kv_session.h"

#include <unistd.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "bench/kv/workload.h"
#include "bench/report/bench_memory.h"
#include "bench/report/dialogue.h"

namespace baton::bench {
namespace {

// One initiator and the memory it works on.
class Client {
 public:
  Client(Worker& worker, PeerId peer, std::optional<int> device)
      : worker_(worker), peer_(peer), device_(device) {}

  PeerId peer() const { return peer_; }

  Json answer(const Json& request) {
    const std::string what = text_of(request, "do");
    if (what == "setup") return setup(request);
    if (memory_ == nullptr) return refusal(absl::FailedPreconditionError("send \"setup\" first"));
    const Layout& layout = source_ ? workload_->source() : workload_->target();
    const auto seed = request.find("seed");
    const uint64_t number =
        seed != request.end() && seed->is_number_unsigned() ? seed->get<uint64_t>() : 0;
    absl::Status status;
    if (what == "poison") {
      poison(memory_->host(), memory_->size());
      status = memory_->load();
    } else if (what == "fill") {
      fill(memory_->host(), layout, number);
      status = memory_->load();
    } else if (what == "check") {
      status = memory_->fetch();
      if (status.ok()) status = check(memory_->host(), memory_->size(), layout, number);
    } else {
      return refusal(absl::InvalidArgumentError(absl::StrCat("unknown request \"", what, "\"")));
    }
    return status.ok() ? Json{{"ok", true}} : refusal(status);
  }

 private:
  Json setup(const Json& request) {
    const auto spec = WorkloadSpec::from_json(request.value("workload", Json()));
    if (!spec.ok()) return refusal(spec.status());
    auto workload = Workload::make(*spec);
    if (!workload.ok()) return refusal(workload.status());
    memory_.reset();
    workload_ = *std::move(workload);
    source_ = text_of(request, "role") == "source";
    const size_t bytes = source_ ? workload_->source_bytes() : workload_->target_bytes();
    auto memory = BenchMemory::make(worker_, bytes, device_);
    if (!memory.ok()) return refusal(memory.status());
    const auto region = worker_.remote_region((*memory)->region());
    if (!region.ok()) return refusal(region.status());
    memory_ = *std::move(memory);
    return {{"ok", true},
            {"region", std::string(absl::BytesToHexString(region->encode()))},
            {"offset", memory_->offset()},
            {"backing", memory_->backing()}};
  }

  Worker& worker_;
  const PeerId peer_;
  std::unique_ptr<Workload> workload_;
  const std::optional<int> device_;
  std::unique_ptr<BenchMemory> memory_;
  bool source_ = false;
};

}  // namespace

absl::Status serve_kv_target(Worker& worker, const KvTargetOptions& options) {
  std::unique_ptr<Client> client;
  const auto leave = [&] {
    client.reset();
    if (options.say) options.say("the initiator has left");
  };
  while (true) {
    Notification message;
    std::optional<PeerEvent> event;
    bool told = false;
    const absl::Status status = worker.wait_until([&] {
      told = worker.next_notification(message);
      if (!told) event = worker.next_peer_event();
      return told || event.has_value();
    });
    if (!status.ok()) return status;
    if (event.has_value()) {
      if (event->kind == PeerEvent::Kind::kUp) {
        if (options.say) options.say(absl::StrCat("connected: ", worker.explain(event->peer)));
      } else if (event->kind == PeerEvent::Kind::kDown && client != nullptr &&
                 event->peer == client->peer()) {
        leave();
        if (options.once) return absl::OkStatus();
      }
      continue;
    }
    const Json request = parse_message(message.payload);
    const bool known = client != nullptr && message.peer == client->peer();
    Json reply;
    if (request.is_null()) {
      reply = refusal(absl::InvalidArgumentError("a request must be a JSON object"));
    } else if (text_of(request, "do") == "bye") {
      if (!known) continue;
      leave();
      if (options.once) return absl::OkStatus();
      continue;
    } else if (client != nullptr && !known) {
      reply = refusal(absl::UnavailableError("another initiator is being served: try again later"));
    } else {
      if (!known) client = std::make_unique<Client>(worker, message.peer, options.device);
      reply = client->answer(request);
    }
    worker.notify_detached(message.peer, reply.dump()).IgnoreError();
  }
}

namespace {

const Time kStartTimeout = patient(std::chrono::seconds(15));
constexpr const char* kReady = "ready ";

WorkerOptions worker_options(const char* name, const KvBwOptions& options) {
  WorkerOptions out;
  out.name = name;
  out.providers = {options.provider};
  out.require = options.provider;
  out.settings = options.settings;
  return out;
}

double microseconds(Time time) { return std::chrono::duration<double, std::micro>(time).count(); }

// Tells the other end of the pipe one line.
void tell(int out, const std::string& line) {
  const std::string text = line + "\n";
  [[maybe_unused]] const ssize_t put = write(out, text.data(), text.size());
}

int run_target(const KvBwOptions& options, int out) {
  auto worker = Worker::create(worker_options("kv_bw-target", options));
  if (!worker.ok()) {
    tell(out, std::string(worker.status().message()));
    return 1;
  }
  tell(out, kReady + (*worker)->address());
  return serve_kv_target(**worker, {.once = true, .device = options.cuda}).ok() ? 0 : 1;
}

}  // namespace

Cores choose_cores(const KvBwOptions& options) {
  const std::vector<int>& cpus = allowed_cpus();
  if (!options.pin || cpus.size() < 2) return {};
  return {.initiator = cpus[0], .target = cpus[1]};
}

absl::StatusOr<std::unique_ptr<KvSession>> KvSession::open(const KvBwOptions& options,
                                                           Cores cores) {
  std::unique_ptr<KvSession> session(new KvSession);
  session->device_ = options.cuda;
  WorkerOptions mine = worker_options("kv_bw", options);
  std::string address = options.host;
  if (address.empty()) {
    auto child =
        ChildProcess::fork(cores.target, [&](int out) { return run_target(options, out); });
    if (!child.ok()) return child.status();
    session->target_ = *std::move(child);
    const auto line = session->target_->read_line(kStartTimeout);
    if (!line.ok()) return line.status();
    const size_t prefix = std::string(kReady).size();
    if (line->compare(0, prefix, kReady) != 0) return absl::UnavailableError(*line);
    address = line->substr(prefix);
  } else if (options.provider != "tcp") {
    mine.providers.emplace_back("tcp");  // looks host:port up
  }
  pin_to(cores.initiator);
  auto worker = Worker::create(std::move(mine));
  if (!worker.ok()) return worker.status();
  session->worker_ = *std::move(worker);
  const auto peer =
      connect_to_server(*session->worker_, address, options.provider, "`baton kv_bw --listen`");
  if (!peer.ok()) return peer.status();
  session->peer_ = *peer;
  return session;
}

KvSession::~KvSession() {
  if (worker_ != nullptr) say_bye(*worker_, peer_);
  local_.reset();
  worker_.reset();
  if (target_) target_->wait(std::chrono::seconds(5)).IgnoreError();
}

absl::StatusOr<Json> KvSession::ask(const Json& question) {
  const auto hear = [this](std::string& message) {
    Notification next;
    if (!worker_->next_notification(next)) return false;
    message = std::move(next.payload);
    return true;
  };
  return bench::ask(*worker_, peer_, question, hear);
}

size_t KvSession::remote_bytes() const {
  return op_ == Op::kWrite ? workload_->target_bytes() : workload_->source_bytes();
}

absl::Status KvSession::prepare(Op op, const WorkloadSpec& spec) {
  auto workload = Workload::make(spec);
  if (!workload.ok()) return workload.status();
  local_.reset();
  workload_ = *std::move(workload);
  op_ = op;
  seed_ += 1000;
  const bool writes = op == Op::kWrite;
  const auto made =
      ask({{"do", "setup"}, {"role", writes ? "target" : "source"}, {"workload", spec.to_json()}});
  if (!made.ok()) return made.status();
  const auto region = made->find("region");
  const auto offset = made->find("offset");
  if (region == made->end() || !region->is_string() || offset == made->end() || *offset != 0) {
    return absl::InvalidArgumentError("the target names no region: run the same release");
  }
  const auto remote = RemoteRegion::decode(absl::HexStringToBytes(region->get<std::string>()));
  if (!remote.ok()) return remote.status();

  const size_t bytes = writes ? workload_->source_bytes() : workload_->target_bytes();
  auto memory = BenchMemory::make(*worker_, bytes, device_);
  if (!memory.ok()) return memory.status();
  local_ = *std::move(memory);
  poison(local_->host(), local_->size());
  if (writes) fill(local_->host(), workload_->source(), seed_);
  if (absl::Status status = local_->load(); !status.ok()) return status;
  if (auto poisoned = ask({{"do", "poison"}}); !poisoned.ok()) return poisoned.status();
  if (!writes) {
    if (auto filled = ask({{"do", "fill"}, {"seed", seed_}}); !filled.ok()) return filled.status();
  }
  request_ = {.op = op,
              .peer = peer_,
              .local = local_->region(),
              .local_layout = writes ? workload_->source() : workload_->target(),
              .remote = *remote,
              .remote_layout = writes ? workload_->target() : workload_->source()};
  return absl::OkStatus();
}

absl::StatusOr<double> KvSession::run(size_t count, size_t inflight) {
  flights_.assign(std::min(count, inflight), {});
  TransferRequest request = request_;
  request.on_end = [](void* context, TransferId, const absl::Status&) {
    static_cast<Flight*>(context)->end = Clock::steady().now();
  };
  for (auto* times : {&latencies_, &submits_}) times->reserve(times->size() + count);
  const Time begin = Clock::steady().now();
  absl::Status status;
  for (size_t i = 0; i < count && status.ok(); ++i) {
    Flight& flight = flights_[i % flights_.size()];
    status = land(flight);
    if (!status.ok()) break;
    request.context = &flight;
    flight.begin = Clock::steady().now();
    auto id = worker_->submit(request);
    submits_.push_back(microseconds(Clock::steady().now() - flight.begin));
    if (id.ok()) flight.id = *id;
    status = id.status();
  }
  for (Flight& flight : flights_) {
    const absl::Status landed = land(flight);
    if (status.ok()) status = landed;
  }
  if (!status.ok()) return status;
  return std::chrono::duration<double>(Clock::steady().now() - begin).count();
}

// Waits for a transfer, if there is one.
absl::Status KvSession::land(Flight& flight) {
  if (flight.id.generation == 0) return absl::OkStatus();
  const absl::Status status = worker_->wait(flight.id);
  latencies_.push_back(microseconds(flight.end - flight.begin));
  flight.id = {};
  return status;
}

absl::Status KvSession::verify() {
  if (op_ == Op::kRead) {
    if (absl::Status status = local_->fetch(); !status.ok()) return status;
    return check(local_->host(), local_->size(), workload_->target(), seed_);
  }
  return ask({{"do", "check"}, {"seed", seed_}}).status();
}

std::string KvSession::route() const { return worker_->explain(peer_); }

}  // namespace baton::bench
