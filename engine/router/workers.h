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
#include <string>
#include <utility>
#include <vector>

#include "engine/http/event_loop.h"
#include "engine/http/http_fetch.h"
#include "engine/router/worker_picker.h"

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

// Holds a place with a worker for as long as it lives.
class Place {
 public:
  Place() = default;
  Place(WorkerPicker& picker, std::optional<WorkerPicker::Pick> pick)
      : picker_(&picker), pick_(pick) {}
  ~Place() { release(); }
  Place(Place&& other) noexcept { *this = std::move(other); }
  Place& operator=(Place&& other) noexcept {
    release();
    picker_ = other.picker_;
    pick_ = std::exchange(other.pick_, std::nullopt);
    return *this;
  }
  bool has_value() const { return pick_.has_value(); }
  size_t operator*() const { return pick_->worker; }
  size_t missing() const { return pick_->missing; }
  // The prompt needs no computing any more.
  void computed() {
    if (pick_.has_value()) picker_->computed(pick_->id);
  }
  void release() {
    if (pick_.has_value()) picker_->release(pick_->id);
    pick_.reset();
  }

 private:
  WorkerPicker* picker_ = nullptr;
  std::optional<WorkerPicker::Pick> pick_;
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

// Whether a worker was ever healthy, and since when it is not.
struct Standing {
  bool answered = false;
  bool told = false;  // the log has it that it is not used
  int looks = 0;      // of one that has never answered: how often it was found down
  Time down_at{};     // of one that has answered and is down
};

// Workers that can replace each other. An index always means the same worker.
struct WorkerGroup {
  WorkerGroup(const char* role_name, std::vector<http::HttpUrl> given)
      : role(role_name),
        urls(std::move(given)),
        addresses(urls.size()),
        why_down(urls.size()),
        models(urls.size()),
        ways(urls.size()),
        agents(urls.size()),
        standings(urls.size()),
        picker(urls.size()) {}

  size_t size() const { return urls.size(); }
  std::string name(size_t worker) const { return urls[worker].text(); }
  // It is taken no more, but may still be busy with what it was asked.
  bool is_draining(size_t worker) const {
    return picker.is_gone(worker) && picker.stats(worker).in_flight > 0;
  }
  bool is_listed(size_t worker) const { return !picker.is_gone(worker) || is_draining(worker); }
  // As it says itself.
  void set_model(size_t worker, const serve::BlockHash& root, const std::string& fingerprint) {
    picker.set_model(worker, root);
    models[worker] = fingerprint;
  }
  size_t add(http::HttpUrl url) {
    urls.push_back(std::move(url));
    addresses.emplace_back();
    models.emplace_back();
    ways.emplace_back();
    agents.emplace_back();
    standings.emplace_back();
    why_down.emplace_back("it has not been asked yet");
    return picker.add();
  }

  const char* const role;
  std::vector<http::HttpUrl> urls;
  std::vector<std::string> addresses;  // of prefill workers' connectors; "" while unknown
  std::vector<std::string> why_down;   // of those that are
  std::vector<std::string> models;     // fingerprints; "" while unknown
  std::vector<Ways> ways;
  std::vector<KvAgent> agents;  // of prefill workers that have said or answered so
  std::vector<Standing> standings;
  WorkerPicker picker;
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
  Hope hope(const WorkerPicker::Model& model, bool resume, Time now) const;

  bool list_prefill() const { return prefill.picker.present() > 0; }
  Way way(size_t from, size_t to) const {
    const Ways& at_prefill = prefill.ways[from];
    const Ways& at_decode = decode.ways[to];
    if (at_prefill.own && at_decode.own) return Way::kOwn;
    return at_prefill.params && at_decode.params ? Way::kParams : Way::kNone;
  }
  // Whether a worker of the other group takes part in that way, or may: it has not answered yet.
  static bool any(const WorkerGroup& others, bool Ways::*way) {
    for (size_t i = 0; i < others.size(); ++i) {
      if (others.picker.is_gone(i)) continue;
      if (!others.ways[i].known || others.ways[i].*way) return true;
    }
    return false;
  }
  // A decode worker that no listed prefill worker can hand anything over to, and that would pass
  // over what it is told: no caller may take for prefilled what is not.
  bool lacks_prefill(size_t worker) const {
    const Ways& its = decode.ways[worker];
    return its.known && !its.own && list_prefill() && !any(prefill, &Ways::params);
  }
  bool lacks_decode(size_t worker) const {
    const Ways& its = prefill.ways[worker];
    return its.known && !its.own && !any(decode, &Ways::params);
  }
  // The HTTP headers for requests to workers.
  http::HttpHeaders headers() const {
    if (api_key.empty()) return {};
    return {{"Authorization", "Bearer " + api_key}};
  }
};

}  // namespace baton::engine::router
