// The workers as the router knows them. Internal to engine/router; everything runs on the loop's
// thread.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "engine/http/event_loop.h"
#include "engine/http/http_fetch.h"

namespace baton::engine::router {

// Limits retries to a fraction of all requests, so that failures do not multiply load. It covers
// failures that the request itself may cause. Requests that a dead worker left are not charged:
// they are retried only once.
//
// Works as Finagle's retry budgets: every request earns a part of a retry, a retry costs a whole
// one. A few may be saved up, and are there from the start. Not thread-safe.
class RetryBudget {
 public:
  void earn() { left_ = std::min(kMost, left_ + kPerRequest); }
  // False where nothing is left to spend.
  bool spend() {
    if (left_ < 1) return false;
    left_ -= 1;
    return true;
  }

 private:
  static constexpr double kPerRequest = 0.2;
  static constexpr double kMost = 10;
  double left_ = kMost;
};

// How the KV of a prompt gets from a prefill worker to a decode worker, as far as the router has a
// part in it.
enum class Way : uint8_t {
  kNone,
  kOwn,     // decode is told where prefill's connector is, and asks it
  kParams,  // as vLLM's servers have it: prefill is asked, and decode is told what it answered
};

// The hand-over methods that a worker supports.
struct Ways {
  bool known = false;  // it has answered
  bool own = false;
  bool params = false;
};

// An agent of Baton's at a worker: kv_transfer_params may name it before the worker has answered.
struct KvAgent {
  std::string name;
  std::string address;  // HOST:PORT
  int64_t ranks = 1;    // tensor-parallel, each with an agent at a port of its own
  bool known() const { return !name.empty() && !address.empty(); }
};

// The beginnings that a prompt may share with others.
struct PromptKey {
  std::vector<size_t> chain;  // hashes of its first pieces, each with all before it
  size_t tokens = 0;          // of a prompt that came as tokens; 0: it is a text
};
// Hashes the first 64 pieces of 256 bytes. Thread-safe.
PromptKey prompt_key(std::string_view bytes, size_t tokens = 0);

struct KnownWorker {
  http::HttpUrl url;
  bool up = true;
  bool gone = false;    // it is taken no more, but may still be busy with what it was asked
  bool resumes = true;  // it takes tokens that another one wrote; vLLM does not
  std::string why_down;
  std::string model;    // the fingerprint of its weights, as it says itself; "" while unknown
  std::string serves;   // of another make: the name of its model, for people
  std::string address;  // of a prefill worker's connector; "" while unknown
  Ways ways;
  KvAgent agent;      // of a prefill worker that has said or answered so
  bool told = false;  // the log has it that it is not used
  int looks = 0;      // until it has answered: how often it was found down
  bool answered = false;
  Time down_at{};  // of one that has answered and is down
  size_t in_flight = 0;
  size_t given = 0;  // pieces of prompts, ever

  std::string name() const { return url.text(); }
  bool is_draining() const { return gone && in_flight > 0; }
  bool is_listed() const { return !gone || is_draining(); }
  // Whether it may be asked what `model` has begun ("": any): it is not known to have another one.
  bool fits(const std::string& wanted, bool resume) const {
    return !gone && (wanted.empty() || model.empty() || model == wanted) && (resumes || !resume);
  }
};

// Workers that can replace each other. An index always means the same worker.
class WorkerGroup {
 public:
  WorkerGroup(const char* role_name, std::vector<http::HttpUrl> urls) : role(role_name) {
    for (http::HttpUrl& url : urls) workers_.emplace_back().url = std::move(url);
  }

  size_t size() const { return workers_.size(); }
  KnownWorker& operator[](size_t worker) { return workers_[worker]; }
  const KnownWorker& operator[](size_t worker) const { return workers_[worker]; }
  auto begin() const { return workers_.begin(); }
  auto end() const { return workers_.end(); }
  // Workers that are not gone.
  size_t present() const;
  // One that is down until it has answered.
  size_t add(http::HttpUrl url);

  // Picks one that was given the same beginning before, if it is not much busier than the others,
  // else the least busy; counts one more request for it until release(). Workers in `avoid` and
  // those that are down are taken only if there is no other; nothing if no worker fits.
  std::optional<size_t> pick(const PromptKey& key, std::span<const size_t> avoid = {},
                             const std::string& model = "", bool resume = false);
  void release(size_t worker) { --workers_[worker].in_flight; }
  // True if pick() would find a healthy worker that is not in `avoid`.
  bool has_other(std::span<const size_t> avoid, const std::string& model = "") const;
  // It has missed what the others were given while it was down, and need not make up for it.
  void catch_up(size_t worker);

  const char* const role;

 private:
  static constexpr size_t kSlack = 2;  // requests that a guessed hit is worth
  static constexpr size_t kMaxPrefixes = 1 << 16;

  // Those whose health is as good as the best one's.
  std::vector<size_t> usable(std::span<const size_t> avoid, const std::string& model,
                             bool resume) const;

  std::vector<KnownWorker> workers_;
  absl::flat_hash_map<size_t, size_t> prefixes_;  // which worker was given it last
};

// Holds a place with a worker for as long as it lives.
class Place {
 public:
  Place() = default;
  Place(WorkerGroup& group, std::optional<size_t> worker) : group_(&group), worker_(worker) {}
  ~Place() { release(); }
  Place(Place&& other) noexcept { *this = std::move(other); }
  Place& operator=(Place&& other) noexcept {
    release();
    group_ = other.group_;
    worker_ = std::exchange(other.worker_, std::nullopt);
    return *this;
  }
  bool has_value() const { return worker_.has_value(); }
  size_t operator*() const { return *worker_; }
  KnownWorker* operator->() const { return &(*group_)[*worker_]; }
  void release() {
    if (worker_.has_value()) group_->release(*worker_);
    worker_.reset();
  }

 private:
  WorkerGroup* group_ = nullptr;
  std::optional<size_t> worker_;
};

class RelayedRequest;

// Why a worker of another make gets nothing beside workers of Baton's.
inline constexpr char kNoPrefillForIt[] =
    "it is not a `baton serve`, and no prefill worker hands KV over by vLLM's kv_transfer_params: "
    "start "
    "Baton's with --kv-agent NAME --kv-agent-address HOST:PORT (docs/vllm.md), or list no prefill "
    "workers";
inline constexpr char kNoDecodeForIt[] =
    "it is not a `baton serve --role prefill`, and no decode worker takes KV by vLLM's "
    "kv_transfer_params: start Baton's with --kv-agent NAME --kv-agent-address HOST:PORT "
    "(docs/vllm.md)";

struct Workers {
  Workers(std::vector<http::HttpUrl> prefill_urls, std::vector<http::HttpUrl> decode_urls)
      : prefill("prefill", std::move(prefill_urls)), decode("decode", std::move(decode_urls)) {}

  WorkerGroup prefill, decode;
  RetryBudget retries;
  int max_retries = 3;  // in a row without a new token
  uint64_t retried = 0;
  Time comeback{};               // how long a decode worker that went down is expected back
  uint64_t handed_over = 0;      // prompts whose KV decode was told to fetch, by kv_transfer_params
  uint64_t not_handed_over = 0;  // for which prefill was asked, and which decode computed
  std::string api_key;
  std::shared_ptr<http::HttpTrust> trust;  // in workers that are reached by https
  std::shared_ptr<http::EventLoop> loop;
  std::set<RelayedRequest*> open;
  bool ending = false;  // the router is: no request begins any more

  // The worker is used no more until it answers a probe, or is used again. The log gets one line
  // for each change. `why` is for people: /health of the router has it too.
  void set_down(WorkerGroup& group, size_t worker, std::string why);
  void set_up(WorkerGroup& group, size_t worker);
  // The chances of a request that lost its decode worker. Among the workers that have its model and
  // can continue it: kNow, one is up; kSoon, one was up until a moment ago.
  enum class Hope : uint8_t { kNone, kSoon, kNow };
  Hope hope(const std::string& model, bool resume, Time now) const;

  bool list_prefill() const { return prefill.present() > 0; }
  Way way(size_t from, size_t to) const {
    const Ways& at_prefill = prefill[from].ways;
    const Ways& at_decode = decode[to].ways;
    if (at_prefill.own && at_decode.own) return Way::kOwn;
    return at_prefill.params && at_decode.params ? Way::kParams : Way::kNone;
  }
  // Whether a worker of the other group takes part in that way, or may: it has not answered yet.
  static bool any(const WorkerGroup& others, bool Ways::*way) {
    return std::any_of(others.begin(), others.end(), [way](const KnownWorker& other) {
      return !other.gone && (!other.ways.known || other.ways.*way);
    });
  }
  // A decode worker that no listed prefill worker can hand anything over to, and that would pass
  // over what it is told: no caller may take for prefilled what is not.
  bool lacks_prefill(size_t worker) const {
    const Ways& its = decode[worker].ways;
    return its.known && !its.own && list_prefill() && !any(prefill, &Ways::params);
  }
  bool lacks_decode(size_t worker) const {
    const Ways& its = prefill[worker].ways;
    return its.known && !its.own && !any(decode, &Ways::params);
  }
  // The HTTP headers for requests to workers.
  http::HttpHeaders headers() const {
    if (api_key.empty()) return {};
    return {{"Authorization", "Bearer " + api_key}};
  }
};

// The file that says which workers there are (`baton serve --role router --workers FILE`).
//
//   # one worker a line: its role, and where it listens
//   prefill http://10.0.0.1:8001
//   decode  http://10.0.0.2:8002

struct ListedWorkers {
  std::vector<http::HttpUrl> prefill, decode;
};

// InvalidArgument names the line and what is wrong with it: a role that is neither, a malformed
// URL, words behind it, a worker that is listed twice; also without any decode worker, and where
// the last line has no end, for then the writer may be writing still.
absl::StatusOr<ListedWorkers> parse_worker_list(std::string_view text);

}  // namespace baton::engine::router
