// The client of the perftest-shaped commands: connects, agrees on a plan, measures.
#include "bench/perftest/perf_client.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "bench/report/fast_clock.h"

namespace baton::bench {
namespace {

using Verb = PerfTest::Verb;
constexpr Time kStalled = std::chrono::seconds(30);  // without a single message
constexpr Time kLiveEvery = std::chrono::seconds(1);
constexpr size_t kLookEvery = 256;                 // idle rounds between looks at clock and peer
constexpr size_t kMostVerified = size_t{1} << 30;  // more takes longer to check than to move
constexpr size_t kColdLeast = size_t{64} << 20;
constexpr size_t kColdMost = size_t{512} << 20;  // a virtual machine may see the cache of a socket

// Twice the last-level cache, which no prefetcher and no other core can hide.
size_t cold_area() {
  const long cache = sysconf(_SC_LEVEL3_CACHE_SIZE);
  return std::clamp(2 * static_cast<size_t>(std::max(0L, cache)), kColdLeast, kColdMost);
}

absl::Status with_remedy(const absl::Status& status, const std::string& provider) {
  if (provider == "tcp") return status;
  return absl::Status(
      status.code(),
      absl::StrFormat(
          "%s. `baton doctor --provider %s` tells more; --provider tcp works everywhere",
          status.message(), provider));
}

}  // namespace

PerfPlan plan_of(const PerfOptions& options) {
  PerfPlan plan;
  plan.test = options.test;
  plan.bidirectional = options.bidirectional;
  plan.events = options.events;
  plan.immediate = options.immediate;
  plan.cold = options.cold;
  plan.depth = options.depth;
  plan.post_list = options.post_list;
  plan.receives = options.receives;
  const size_t largest =
      PerfPlan::stride(*std::max_element(options.sizes.begin(), options.sizes.end()));
  plan.area = std::max<size_t>(4096, 2 * largest);
  if (options.cold) plan.area = std::max(cold_area(), 2 * largest);
  plan.area = std::min(plan.area, PerfPlan::kMaxArea);
  plan.verify = options.verify && plan.area <= kMostVerified;
  return plan;
}

absl::StatusOr<std::unique_ptr<PerfClient>> PerfClient::open(const PerfOptions& options,
                                                             const std::string& address,
                                                             const Say& say) {
  std::unique_ptr<PerfClient> client(new PerfClient(options));
  const std::string provider = options.client_provider();
  WorkerOptions mine;
  mine.name = absl::StrCat("baton-", options.test.name());
  mine.providers = {provider};
  mine.require = provider;
  mine.settings = options.settings;
  mine.max_transfers = static_cast<uint32_t>(std::max<size_t>(4096, 3 * options.depth + 64));
  if (provider != "tcp" && address.find("baton1:") != 0) mine.providers.emplace_back("tcp");
  auto worker = Worker::create(std::move(mine));
  if (!worker.ok()) return with_remedy(worker.status(), provider);
  client->worker_ = *std::move(worker);
  const auto peer =
      connect_to_server(*client->worker_, address, provider,
                        absl::StrFormat("`baton %s` without a HOST", options.test.name()));
  if (!peer.ok()) return with_remedy(peer.status(), provider);
  client->peer_ = *peer;
  if (absl::Status status = client->agree(say); !status.ok()) return status;
  return client;
}

absl::Status PerfClient::agree(const Say& say) {
  plan_ = plan_of(options_);
  auto end = PerfEnd::create(*worker_, peer_, plan_,
                             {.huge_pages = options_.huge_pages, .device = options_.cuda});
  if (!end.ok()) return end.status();
  const auto ends = (*end)->describe();
  if (!ends.ok()) return ends.status();
  auto answer =
      ask({{"do", "plan"}, {"speaks", kPerfProtocol}, {"plan", plan_.to_json()}, {"ends", *ends}});
  while (answer.ok() && answer->contains("wait")) {
    if (say) say(absl::StrCat(text_of(*answer, "wait"), ": waiting for the server to be free"));
    answer = ask(Json(), kNever);
  }
  if (!answer.ok()) return answer.status();
  if (absl::Status status = (*end)->attach(*answer); !status.ok()) return status;
  end_ = *std::move(end);
  return absl::OkStatus();
}

PerfClient::~PerfClient() {
  if (worker_ != nullptr) say_bye(*worker_, peer_);
  end_.reset();
}

void PerfClient::drain() {
  while (worker_->next_notification(message_)) control_.push_back(message_.payload);
}

absl::StatusOr<Json> PerfClient::ask(const Json& question, Time timeout) {
  const auto hear = [this](std::string& message) {
    drain();
    if (end_ != nullptr) end_->take_in();  // the server may have more to send
    if (control_.empty()) return false;
    message = std::move(control_.front());
    control_.pop_front();
    return true;
  };
  return bench::ask(*worker_, peer_, question, hear, timeout);
}

// Runs a sender to its end. Afterwards nothing of it is under way, whatever is returned.
absl::Status PerfClient::drive(PerfSender& sender, const Live& live) {
  const Clock& clock = worker_->clock();
  Time next_line = clock.now() + kLiveEvery, last_line = clock.now(), last_move = last_line;
  const Time begin = last_line;
  uint64_t moved = 0, told = 0;
  absl::Status status;
  const auto look = [&] {
    const Time now = clock.now();
    if (sender.ended() != std::exchange(moved, sender.ended())) last_move = now;
    if (worker_->peer_state(peer_) == PeerState::kDown) {
      status = server_has_gone(*worker_, peer_);
    } else if (now - last_move > kStalled) {
      status = absl::DeadlineExceededError(
          "no message ended for 30 s: is the server stopped, or the link down?");
    }
    if (live && now >= next_line) {
      const double since = std::chrono::duration<double>(now - last_line).count();
      live(end_->run().size, std::chrono::duration<double>(now - begin).count(),
           static_cast<double>(sender.ended() - std::exchange(told, sender.ended())) / since);
      last_line = now;
      next_line = now + kLiveEvery;
    }
  };
  sender.start();
  size_t rounds = 0, idle = 0;
  while (status.ok() && !sender.finished()) {
    if (plan_.events) {
      worker_
          ->wait_until(
              [&] {
                end_->take_in();
                return sender.step() || sender.finished() ||
                       worker_->peer_state(peer_) == PeerState::kDown;
              },
              kLiveEvery)
          .IgnoreError();
      look();
      continue;
    }
    bool any = sender.step();
    any |= worker_->progress();
    any |= end_->take_in();
    idle = any ? 0 : idle + 1;
    if (++rounds % kLookEvery == 0) look();
    if (idle >= kLookEvery) sched_yield();  // the server may need this core
  }
  settle(sender, *end_);
  return status.ok() ? sender.status() : status;
}

absl::StatusOr<PerfResult> PerfClient::run(const PerfRun& run, const Live& live) {
  if (absl::Status status = end_->prepare(run); !status.ok()) return status;
  if (auto ready = ask({{"do", "run"}, {"run", run.to_json()}, {"warm_up", !warm_}}); !ready.ok()) {
    return ready.status();
  }
  const CpuMeter cpu;
  auto sender = plan_.test.latency ? make_ping(*end_) : make_stream(*end_, options_.peak);
  if (absl::Status status = drive(*sender, live); !status.ok()) return status;
  const SenderResult mine = sender->result();
  PerfResult result;
  result.cpu_percent = cpu.percent();
  const auto theirs = ask({{"do", "end"}, {"sent", mine.sent}});
  if (!theirs.ok()) return theirs.status();

  const auto number = [&](const char* key) {
    const auto it = theirs->find(key);
    return it != theirs->end() && it->is_number() ? it->get<double>() : 0.0;
  };
  result.size = run.size;
  result.path = worker_->stats().staged_transfers > 0 ? "staged" : "direct";
  result.route = route();
  result.iterations = mine.messages;
  result.seconds = mine.seconds;
  result.bytes_per_s = mine.average;
  result.peak_bytes_per_s = mine.peak;
  result.server_cpu_percent = number("cpu_percent");
  result.latencies = sender->latencies();
  uint64_t to_check = mine.sent;
  if (plan_.bidirectional) {
    result.other_bytes_per_s = number("average");
    result.bytes_per_s += number("average");
    if (options_.peak) result.peak_bytes_per_s += number("peak");
    if (plan_.test.verb != Verb::kRead) to_check = static_cast<uint64_t>(number("sent"));
  }
  result.messages_per_s = result.bytes_per_s / static_cast<double>(run.size);
  if (plan_.bidirectional && plan_.test.verb == Verb::kSend) {
    const absl::Status status = worker_->wait_until(
        [&] {
          end_->take_in();
          return end_->messages_arrived() >= to_check ||
                 worker_->peer_state(peer_) == PeerState::kDown;
        },
        kAnswerTimeout);
    if (!status.ok()) return absl::DataLossError("messages of the server never arrived");
  }
  if (plan_.test.latency || plan_.bidirectional || plan_.test.verb == Verb::kRead) {
    if (absl::Status status = end_->verify(to_check); !status.ok()) return status;
  }
  if (plan_.verify) result.verified = true;
  return result;
}

absl::StatusOr<PerfResult> PerfClient::measure(size_t size, const Live& live) {
  PerfRun work{.size = size, .iterations = options_.iterations, .seed = seed_++};
  if (options_.duration > 0) {
    work.iterations = 0;
    work.seconds = options_.duration;
    work.margin = options_.margin;
  }
  if (!warm_) {
    PerfRun first = work;
    const uint64_t enough = plan_.test.latency ? 100 : 2 * plan_.depth;
    first.iterations = work.iterations > 0 ? std::min(work.iterations, enough) : enough;
    if (auto warmed = run(first, nullptr); !warmed.ok()) return warmed.status();
    warm_ = true;
    if (options_.dma_buf && worker_->stats().staged_transfers > 0) {
      return absl::FailedPreconditionError(
          absl::StrCat("--use_cuda_dmabuf, but the memory is staged: ", route()));
    }
    work.seed = seed_++;
  }
  return run(work, live);
}

}  // namespace baton::bench
