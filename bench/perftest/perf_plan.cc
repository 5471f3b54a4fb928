// Plans and runs as JSON, checked when decoded: they come from a peer.
#include "bench/perftest/perf_plan.h"

#include <array>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace baton::bench {
namespace {

constexpr std::array kVerbs = {"write", "read", "send"};
constexpr double kMaxSeconds = 1e7;

// Reads members of an object; remembers the first that is missing, of another type or out of range.
class Fields {
 public:
  explicit Fields(const Json& json) : json_(json) {
    if (!json.is_object()) status_ = absl::InvalidArgumentError("not a JSON object");
  }
  bool flag(const char* key) {
    const Json* value = find(key);
    if (value != nullptr && value->is_boolean()) return value->get<bool>();
    complain(key, "true or false");
    return false;
  }
  uint64_t number(const char* key, uint64_t least, uint64_t most) {
    const Json* value = find(key);
    if (value != nullptr && value->is_number_unsigned()) {
      const uint64_t number = value->get<uint64_t>();
      if (number >= least && number <= most) return number;
    }
    complain(key, absl::StrFormat("a number from %u to %u", least, most));
    return least;
  }
  double seconds(const char* key) {
    const Json* value = find(key);
    if (value != nullptr && value->is_number()) {
      const double number = value->get<double>();
      if (number >= 0 && number <= kMaxSeconds) return number;
    }
    complain(key, "a number of seconds");
    return 0;
  }
  std::string text(const char* key) {
    const Json* value = find(key);
    if (value != nullptr && value->is_string()) return value->get<std::string>();
    complain(key, "a string");
    return "";
  }
  const absl::Status& status() const { return status_; }

 private:
  const Json* find(const char* key) const {
    if (!json_.is_object()) return nullptr;
    const auto it = json_.find(key);
    return it == json_.end() ? nullptr : &*it;
  }
  void complain(const char* key, const std::string& what) {
    if (status_.ok()) {
      status_ = absl::InvalidArgumentError(
          absl::StrFormat("\"%s\" must be %s: run the same release on both sides", key, what));
    }
  }
  const Json& json_;
  absl::Status status_;
};

}  // namespace

std::string PerfTest::name() const {
  return absl::StrCat(kVerbs[static_cast<size_t>(verb)], latency ? "_lat" : "_bw");
}

std::optional<PerfTest> PerfTest::named(std::string_view name) {
  for (const Verb verb : {Verb::kWrite, Verb::kRead, Verb::kSend}) {
    for (const bool latency : {false, true}) {
      const PerfTest test{verb, latency};
      if (test.name() == name) return test;
    }
  }
  return std::nullopt;
}

Json PerfPlan::to_json() const {
  return {{"test", test.name()},  {"bidirectional", bidirectional},
          {"events", events},     {"immediate", immediate},
          {"verify", verify},     {"cold", cold},
          {"depth", depth},       {"post_list", post_list},
          {"receives", receives}, {"area", area}};
}

absl::StatusOr<PerfPlan> PerfPlan::from_json(const Json& json) {
  Fields fields(json);
  PerfPlan plan;
  const std::string name = fields.text("test");
  plan.bidirectional = fields.flag("bidirectional");
  plan.events = fields.flag("events");
  plan.immediate = fields.flag("immediate");
  plan.verify = fields.flag("verify");
  plan.cold = fields.flag("cold");
  plan.depth = fields.number("depth", 1, kMaxDepth);
  plan.post_list = fields.number("post_list", 1, plan.depth);
  plan.receives = fields.number("receives", 1, kMaxReceives);
  plan.area = fields.number("area", kStep, kMaxArea);
  if (!fields.status().ok()) return fields.status();
  const auto test = PerfTest::named(name);
  if (!test.has_value()) {
    return absl::InvalidArgumentError("an unknown test: run the same release on both sides");
  }
  plan.test = *test;
  if (plan.test.latency && plan.bidirectional) {
    return absl::InvalidArgumentError("a latency test always goes both ways");
  }
  return plan;
}

Json PerfRun::to_json() const {
  return {{"size", size},
          {"iterations", iterations},
          {"seconds", seconds},
          {"margin", margin},
          {"seed", seed}};
}

absl::StatusOr<PerfRun> PerfRun::from_json(const Json& json, const PerfPlan& plan) {
  Fields fields(json);
  PerfRun run;
  run.size = fields.number("size", 1, plan.area);
  run.iterations = fields.number("iterations", 0, UINT64_MAX);
  run.seconds = fields.seconds("seconds");
  run.margin = fields.seconds("margin");
  run.seed = fields.number("seed", 0, UINT64_MAX);
  if (!fields.status().ok()) return fields.status();
  if (plan.slots(run.size) == 0) {
    return absl::InvalidArgumentError("the size does not fit into the agreed memory");
  }
  return run;
}

}  // namespace baton::bench
