// The server of the perftest-shaped commands: serves one client at a time, the others wait.
#include "bench/perftest/perf_client.h"

#include <sched.h>

#include <deque>
#include <memory>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "bench/perftest/perf_sender.h"
#include "bench/report/dialogue.h"
#include "bench/report/fast_clock.h"

namespace baton::bench {
namespace {

// A client that is being served.
class Client {
 public:
  Client(Worker& worker, PeerId peer) : worker_(worker), peer_(peer) {}
  ~Client() { finish_run(); }

  PeerId peer() const { return peer_; }
  bool running() const { return running_; }
  // Polling pays: the other side waits for our next message, or for our receives.
  bool polls() const {
    const PerfTest& test = end_->plan().test;
    return running_ && !end_->plan().events &&
           (sender_ != nullptr || test.latency || test.verb == PerfTest::Verb::kSend);
  }
  bool step() {
    if (!running_) return false;
    const bool any = end_->take_in();
    return (sender_ != nullptr && sender_->step()) || any;
  }

  absl::StatusOr<Json> start(const Json& request, const PerfMemory& memory) {
    const auto plan = PerfPlan::from_json(request.value("plan", Json()));
    if (!plan.ok()) return plan.status();
    auto end = PerfEnd::create(worker_, peer_, *plan, memory);
    if (!end.ok()) return end.status();
    if (absl::Status status = (*end)->attach(request); !status.ok()) return status;
    auto ends = (*end)->describe();
    if (!ends.ok()) return ends.status();
    end_ = *std::move(end);
    return Json{{"ok", true}, {"ends", *std::move(ends)}, {"memory", end_->backing()}};
  }

  absl::StatusOr<Json> run(const Json& request) {
    const auto run = PerfRun::from_json(request.value("run", Json()), end_->plan());
    if (!run.ok()) return run.status();
    finish_run();
    if (worker_.peer_state(peer_) != PeerState::kUp) return worker_.peer_status(peer_);
    if (absl::Status status = end_->prepare(*run); !status.ok()) return status;
    const PerfPlan& plan = end_->plan();
    if (plan.test.latency) {
      if (plan.test.verb != PerfTest::Verb::kRead) sender_ = make_echo(*end_);
    } else if (plan.bidirectional) {
      sender_ = make_stream(*end_, true);
    }
    if (sender_ != nullptr) sender_->start();
    running_ = true;
    asked_.reset();
    cpu_ = CpuMeter();
    rows_ += request.value("warm_up", false) ? 0 : 1;
    return Json{{"ok", true}};
  }

  absl::Status end(const Json& request) {
    const auto sent = request.find("sent");
    if (!running_ || sent == request.end() || !sent->is_number_unsigned()) {
      return absl::InvalidArgumentError("\"end\" without a run");
    }
    asked_ = sent->get<uint64_t>();
    if (sender_ != nullptr && end_->plan().test.latency) sender_->stop();
    return absl::OkStatus();
  }

  // The answer to "end", once everything that was sent is here.
  std::optional<Json> outcome() {
    if (!running_ || !asked_.has_value()) return std::nullopt;
    const PerfPlan& plan = end_->plan();
    const bool sends = plan.test.verb == PerfTest::Verb::kSend;
    if (sender_ != nullptr && !sender_->finished()) return std::nullopt;
    if (sends && end_->messages_arrived() < *asked_) return std::nullopt;
    Json out = {{"ok", true}, {"cpu_percent", cpu_.percent()}};
    absl::Status status = sender_ != nullptr ? sender_->status() : absl::OkStatus();
    if (plan.bidirectional) {
      const SenderResult result = sender_->result();
      out["sent"] = result.sent;
      out["messages"] = result.messages;
      out["average"] = result.average;
      out["peak"] = result.peak;
    }
    const bool received = plan.test.verb != PerfTest::Verb::kRead;
    const uint64_t messages = !received && sender_ != nullptr ? sender_->result().sent : *asked_;
    if (status.ok() && (received || plan.bidirectional)) status = end_->verify(messages);
    out["received"] = sends ? end_->messages_arrived() : *asked_;
    if (!status.ok()) out = refusal(status);
    finish_run();
    return out;
  }

  std::string summary() const {
    if (end_ == nullptr) return "no request came";
    return absl::StrFormat("%s, %u run%s", end_->plan().test.name(), rows_, rows_ == 1 ? "" : "s");
  }

 private:
  void finish_run() {
    if (sender_ != nullptr) settle(*sender_, *end_);
    sender_.reset();
    running_ = false;
  }

  Worker& worker_;
  const PeerId peer_;
  std::unique_ptr<PerfEnd> end_;
  std::unique_ptr<PerfSender> sender_;
  std::optional<uint64_t> asked_;
  bool running_ = false;
  uint64_t rows_ = 0;
  CpuMeter cpu_;
};

class Server {
 public:
  Server(Worker& worker, const PerfServerOptions& options) : worker_(worker), options_(options) {}

  absl::Status serve() {
    constexpr size_t kYieldAfter = 256;  // rounds
    constexpr size_t kTurnEvery = 16;
    size_t rounds = 0, idle = 0;
    while (!done_) {
      if (client_ != nullptr && client_->polls()) {
        // Control messages can wait a little; a message that is measured cannot.
        bool any = ++rounds % kTurnEvery == 0 ? turn() : client_->step();
        any |= worker_.progress();
        idle = any ? 0 : idle + 1;
        if (idle >= kYieldAfter) sched_yield();  // the client may need this core
      } else if (absl::Status status = worker_.wait_until([this] { return turn(); });
                 !status.ok()) {
        return status;
      }
    }
    return absl::OkStatus();
  }

 private:
  // Everything that is there to be done; true if there was anything.
  bool turn() {
    bool any = false;
    while (auto event = worker_.next_peer_event()) {
      any = true;
      if (event->kind == PeerEvent::Kind::kDown) left(event->peer);
    }
    while (!done_ && worker_.next_notification(message_)) {
      any = true;
      hear();
    }
    if (client_ == nullptr) return any;
    any |= client_->step();
    if (auto outcome = client_->outcome()) {
      tell(client_->peer(), *outcome);
      any = true;
    }
    return any;
  }

  void hear() {
    const bool ours = client_ != nullptr && message_.peer == client_->peer();
    const Json request = parse_message(message_.payload);
    const std::string what = text_of(request, "do");
    if (what.empty()) return;  // no answer, which the sender might answer
    if (what == "plan") return greet(message_.peer, request);
    if (!ours) {
      return tell(message_.peer, refusal(absl::FailedPreconditionError(
                                     "this serves baton write_bw, read_bw, send_bw and the "
                                     "latencies: a client begins with \"plan\"")));
    }
    if (what == "bye") return left(message_.peer);
    if (what == "run") {
      const auto answer = client_->run(request);
      return tell(message_.peer, answer.ok() ? *answer : refusal(answer.status()));
    }
    const absl::Status status =
        what == "end" ? client_->end(request)
                      : absl::InvalidArgumentError(absl::StrCat("unknown request \"", what, "\""));
    if (!status.ok()) tell(message_.peer, refusal(status));
  }

  void greet(PeerId peer, const Json& request) {
    const auto speaks = request.find("speaks");
    if (speaks == request.end() || *speaks != kPerfProtocol) {
      return tell(
          peer, refusal(absl::FailedPreconditionError(absl::StrFormat(
                    "the client speaks version %s of the test protocol and this server %u: "
                    "run the same release of baton on both sides",
                    speaks == request.end() ? std::string("?") : speaks->dump(), kPerfProtocol))));
    }
    if (client_ != nullptr) {
      tell(peer, {{"wait", absl::StrFormat("the server is busy with %s", client_->summary())}});
      waiting_.emplace_back(peer, request);
      return;
    }
    auto client = std::make_unique<Client>(worker_, peer);
    const auto answer = client->start(request, options_.memory);
    tell(peer, answer.ok() ? *answer : refusal(answer.status()));
    if (!answer.ok()) return;
    client_ = std::move(client);
    say(absl::StrCat("client ", worker_.explain(peer)));
  }

  void left(PeerId peer) {
    std::erase_if(waiting_, [&](const auto& entry) { return entry.first == peer; });
    if (client_ == nullptr || !(client_->peer() == peer)) return;
    say(absl::StrCat("client left: ", client_->summary()));
    client_.reset();
    done_ = options_.once;
    while (!done_ && client_ == nullptr && !waiting_.empty()) {
      const auto next = std::move(waiting_.front());
      waiting_.pop_front();
      greet(next.first, next.second);
    }
  }

  void tell(PeerId peer, const Json& json) {
    worker_.notify_detached(peer, json.dump(-1, ' ', false, Json::error_handler_t::replace))
        .IgnoreError();
  }
  void say(const std::string& line) const {
    if (options_.say) options_.say(line);
  }

  Worker& worker_;
  const PerfServerOptions& options_;
  std::unique_ptr<Client> client_;
  std::deque<std::pair<PeerId, Json>> waiting_;
  Notification message_;
  bool done_ = false;
};

}  // namespace

absl::Status serve_perf(Worker& worker, const PerfServerOptions& options) {
  return Server(worker, options).serve();
}

}  // namespace baton::bench
