// Probes the workers, and decides from the answers which of them are up.
#include "engine/router/health_watch.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/files/json_fields.h"

namespace baton::engine::router {

HealthWatch::HealthWatch(HealthOptions options, Workers& workers,
                         std::function<void(WorkerGroup&, size_t)> on_down)
    : options_(options),
      workers_(workers),
      on_down_(std::move(on_down)),
      decode_(workers.decode.size()),
      prefill_(workers.prefill.size()) {}

void HealthWatch::probe(Probe& probe, const http::HttpUrl& url, const char* path,
                        std::function<void()> done) {
  probe.status = 0;
  probe.body.clear();
  http::HttpFetchRequest get{.url = url, .path = path, .timeout = options_.timeout};
  get.headers = workers_.headers();
  probe.fetch = http::HttpFetch::start(
      workers_.loop, std::move(get),
      {.on_head = [&probe](int status, std::string_view) { probe.status = status; },
       .on_body = [&probe](std::string_view bytes) { probe.body += bytes; },
       .on_end =
           [&probe, done = std::move(done)](const absl::Status& status) {
             if (!status.ok()) probe.status = 0;
             probe.silent = absl::IsDeadlineExceeded(status);
             done();
           }});
}

void HealthWatch::judge_decode(size_t worker) {
  Probe& probe = decode_[worker];
  if (probe.status == 200) {
    probe.missed = 0;
    workers_.decode.picker.set_up(worker, true);
    workers_.decode.picker.set_slow(worker, false);
    return;
  }
  // One that says that it is not well, or whose port is closed, needs no second look.
  ++probe.missed;
  if (probe.silent && probe.missed < options_.misses) return;
  if (!workers_.decode.picker.is_up(worker)) return;
  workers_.decode.picker.set_up(worker, false);
  on_down_(workers_.decode, worker);
}

void HealthWatch::judge_prefill(size_t worker) {
  Probe& probe = prefill_[worker];
  std::string address;
  if (probe.status == 200) {
    const absl::StatusOr<nlohmann::json> parsed =
        parse_json(probe.body, "a prefill worker's address");
    if (parsed.ok()) address = string_field(*parsed, "address", "").value_or("");
  }
  probe.missed = address.empty() ? probe.missed + 1 : 0;
  if (address.empty() && probe.silent && probe.missed < options_.misses) return;
  const bool was_up = workers_.prefill.picker.is_up(worker);
  workers_.prefill.picker.set_up(worker, !address.empty());
  workers_.prefill.addresses[worker] = address;
  if (was_up && address.empty()) on_down_(workers_.prefill, worker);
}

void HealthWatch::probe_all(std::function<void()> done) {
  open_ = 1;
  const auto one_less = [this, done = std::move(done)] {
    if (--open_ == 0) done();
  };
  decode_.resize(workers_.decode.size());
  prefill_.resize(workers_.prefill.size());
  for (size_t i = 0; i < decode_.size(); ++i) {
    if (!workers_.decode.is_listed(i)) continue;
    ++open_;
    probe(decode_[i], workers_.decode.urls[i], "/health", [this, i, one_less] {
      judge_decode(i);
      one_less();
    });
  }
  for (size_t i = 0; i < prefill_.size(); ++i) {
    if (!workers_.prefill.is_listed(i)) continue;
    ++open_;
    probe(prefill_[i], workers_.prefill.urls[i], "/v1/baton/address", [this, i, one_less] {
      judge_prefill(i);
      one_less();
    });
  }
  one_less();
}

void HealthWatch::run() {
  next_ = workers_.loop->after(options_.interval, [this] { probe_all([this] { run(); }); });
}

}  // namespace baton::engine::router
