// Probes the workers, and decides from the answers which of them are up.
#include "engine/router/health_watch.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/files/json_fields.h"

namespace baton::engine::router {
namespace {

constexpr size_t kMaxReason = 200;

}  // namespace

HealthWatch::HealthWatch(HealthOptions options, Workers& workers,
                         std::function<void(WorkerGroup&, size_t)> on_down)
    : options_(options),
      workers_(workers),
      on_down_(std::move(on_down)),
      decode_(workers.decode.size()),
      prefill_(workers.prefill.size()) {}

void HealthWatch::probe(Probe& probe, const KnownWorker& worker, const char* path,
                        std::function<void()> done) {
  probe.status = 0;
  probe.body.clear();
  http::HttpFetchRequest get{.url = worker.url, .path = path, .timeout = options_.timeout};
  get.headers = workers_.headers();
  get.trust = workers_.trust;
  get.has_answered = worker.answered;
  probe.fetch = http::HttpFetch::start(
      workers_.loop, std::move(get),
      {.on_head = [&probe](int status, std::string_view) { probe.status = status; },
       .on_body = [&probe](std::string_view bytes) { probe.body += bytes; },
       .on_end =
           [&probe, done = std::move(done)](const absl::Status& status) {
             if (!status.ok()) probe.status = 0;
             probe.silent = absl::IsDeadlineExceeded(status);
             probe.why = std::string(status.message());
             done();
           }});
}

std::string HealthWatch::describe(const Probe& probe) {
  if (probe.status == 0) return probe.why;
  const absl::StatusOr<nlohmann::json> page = parse_json(probe.body, "a worker's health");
  const auto said = page.ok() ? string_field(*page, "status", "") : page.status();
  if (said.ok() && !said->empty() && said->size() <= kMaxReason && *said != "ok") return *said;
  return probe.status == 200 ? "its answer is malformed"
                             : absl::StrCat("HTTP status ", probe.status);
}

void HealthWatch::note_model(KnownWorker& worker, const nlohmann::json& page) {
  const auto model = string_field(page, "model", "");
  if (model.ok() && !model->empty()) worker.model = model->substr(0, kMaxReason);
}

void HealthWatch::down(WorkerGroup& group, size_t worker, const Probe& probe) {
  down(group, worker, describe(probe), drains(probe));
}

bool HealthWatch::drains(const Probe& probe) {
  if (probe.status != 503) return false;
  const absl::StatusOr<nlohmann::json> page = parse_json(probe.body, "a worker's health");
  return page.ok() && member(*page, "draining") == true;
}

void HealthWatch::down(WorkerGroup& group, size_t worker, std::string why, bool drains) {
  group[worker].serves.clear();  // it is asked again
  const bool was_up = group[worker].up;
  workers_.set_down(group, worker, std::move(why));
  // Where all are down, requests go to one of them all the same: it is left as if it had been up.
  if (!drains && (was_up || group[worker].in_flight > 0)) on_down_(group, worker);
}

KvAgent HealthWatch::agent_in(const nlohmann::json& page) {
  const nlohmann::json& agent = member(page, "kv_agent");
  return {string_field(agent, "name", "").value_or(""),
          string_field(agent, "address", "").value_or(""),
          int_field(agent, "ranks", 1, INT32_MAX, 1).value_or(1)};
}

void HealthWatch::judge_decode(size_t worker) {
  Probe& probe = decode_[worker];
  if (probe.status == 200) {
    probe.missed = 0;
    // vLLM says nothing besides 200. It cannot go on with an answer that another one has begun, and
    // passes over what it is told of our prefill workers' connectors.
    const bool ours = !probe.body.empty();
    const absl::StatusOr<nlohmann::json> page = parse_json(probe.body, "a worker's health");
    KnownWorker& own = workers_.decode[worker];
    own.resumes = ours;
    own.ways = {
        .known = true, .own = ours, .params = !ours || (page.ok() && agent_in(*page).known())};
    if (workers_.lacks_prefill(worker)) return down(workers_.decode, worker, kNoPrefillForIt);
    workers_.set_up(workers_.decode, worker);
    if (page.ok()) note_model(own, *page);
    return;
  }
  // One that says that it is not well, or whose port is closed, needs no second look.
  ++probe.missed;
  if (probe.silent && probe.missed < options_.misses) return;
  down(workers_.decode, worker, probe);
}

bool HealthWatch::judge_prefill(size_t worker) {
  Probe& probe = prefill_[worker];
  WorkerGroup& group = workers_.prefill;
  KnownWorker& own = group[worker];
  if (probe.status == 404) return true;
  std::string address;
  KvAgent agent;
  if (probe.status == 200) {
    const absl::StatusOr<nlohmann::json> parsed =
        parse_json(probe.body, "a prefill worker's address");
    if (parsed.ok()) {
      address = string_field(*parsed, "address", "").value_or("");
      agent = agent_in(*parsed);
      note_model(own, *parsed);
    }
  }
  const bool hands_over = !address.empty() || agent.known();
  probe.missed = hands_over ? 0 : probe.missed + 1;
  if (!hands_over && probe.silent && probe.missed < options_.misses) return false;
  own.address = address;
  own.agent = agent;
  if (probe.status == 200) {
    own.ways = {.known = true, .own = !address.empty(), .params = agent.known()};
  }
  if (!hands_over && probe.status == 200) {
    down(group, worker, "it does not hand KV over: start it with --role prefill");
  } else if (!hands_over) {
    down(group, worker, probe);
  } else if (workers_.lacks_decode(worker)) {
    down(group, worker, kNoDecodeForIt);
  } else {
    workers_.set_up(group, worker);
  }
  return false;
}

void HealthWatch::judge_other_prefill(size_t worker) {
  Probe& probe = prefill_[worker];
  WorkerGroup& group = workers_.prefill;
  if (probe.status != 200) {
    ++probe.missed;
    if (!probe.silent || probe.missed >= options_.misses) down(group, worker, probe);
    return;
  }
  probe.missed = 0;
  KnownWorker& own = group[worker];
  own.address.clear();
  if (own.ways.own) own.agent = {};  // another one than before
  own.ways = {.known = true, .own = false, .params = true};
  if (workers_.lacks_decode(worker)) return down(group, worker, kNoDecodeForIt);
  workers_.set_up(group, worker);
}

void HealthWatch::judge_pairs() {
  for (size_t i = 0; i < workers_.decode.size(); ++i) {
    if (!workers_.decode[i].up || !workers_.lacks_prefill(i)) continue;
    down(workers_.decode, i, kNoPrefillForIt);
  }
  for (size_t i = 0; i < workers_.prefill.size(); ++i) {
    if (!workers_.prefill[i].up || !workers_.lacks_decode(i)) continue;
    down(workers_.prefill, i, kNoDecodeForIt);
  }
}

void HealthWatch::probe_prefill(size_t worker, const std::function<void()>& done) {
  probe(prefill_[worker], workers_.prefill[worker], "/v1/baton/address", [this, worker, done] {
    if (!judge_prefill(worker)) return done();
    probe(prefill_[worker], workers_.prefill[worker], "/health", [this, worker, done] {
      judge_other_prefill(worker);
      probe_name(workers_.prefill, worker, prefill_[worker], done);
    });
  });
}

void HealthWatch::probe_decode(size_t worker, const std::function<void()>& done) {
  probe(decode_[worker], workers_.decode[worker], "/health", [this, worker, done] {
    judge_decode(worker);
    probe_name(workers_.decode, worker, decode_[worker], done);
  });
}

void HealthWatch::probe_name(WorkerGroup& group, size_t worker, Probe& own,
                             const std::function<void()>& done) {
  const KnownWorker& known = group[worker];
  const bool is_ours = !known.model.empty() || !own.body.empty();
  if (is_ours || own.status != 200 || !known.serves.empty()) return done();
  probe(own, known, "/v1/models", [&group, worker, &own, done] {
    const absl::StatusOr<nlohmann::json> page = parse_json(own.body, "a worker's models");
    const nlohmann::json& list = page.ok() ? member(*page, "data") : nlohmann::json();
    if (own.status == 200 && list.is_array() && !list.empty()) {
      group[worker].serves = string_field(list[0], "id", "").value_or("").substr(0, kMaxReason);
    }
    done();
  });
}

void HealthWatch::probe_all(std::function<void()> done) {
  open_ = 1;
  const auto one_less = [this, done = std::move(done)] {
    if (--open_ > 0) return;
    judge_pairs();
    done();
  };
  decode_.resize(workers_.decode.size());
  prefill_.resize(workers_.prefill.size());
  for (size_t i = 0; i < decode_.size(); ++i) {
    if (!workers_.decode[i].is_listed()) continue;
    ++open_;
    probe_decode(i, one_less);
  }
  for (size_t i = 0; i < prefill_.size(); ++i) {
    if (!workers_.prefill[i].is_listed()) continue;
    ++open_;
    probe_prefill(i, one_less);
  }
  one_less();
}

void HealthWatch::run() {
  next_ = workers_.loop->after(options_.interval, [this] { probe_all([this] { run(); }); });
}

}  // namespace baton::engine::router
