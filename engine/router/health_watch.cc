// Probes and what they say about a worker.
#include "engine/router/health_watch.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/files/json_fields.h"

namespace baton::engine::router {

HealthWatch::HealthWatch(HealthOptions options, Workers& workers,
                         std::function<void(size_t)> on_down)
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
  if (!workers_.api_key.empty()) {
    get.headers.emplace_back("Authorization", absl::StrCat("Bearer ", workers_.api_key));
  }
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
    workers_.decodes.set_up(worker, true);
    return;
  }
  // One that says that it is not well, or whose port is closed, needs no second look.
  ++probe.missed;
  if (probe.silent && probe.missed < options_.misses) return;
  if (!workers_.decodes.is_up(worker)) return;
  workers_.decodes.set_up(worker, false);
  on_down_(worker);
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
  workers_.prefills.set_up(worker, !address.empty());
  workers_.addresses[worker] = address;
}

void HealthWatch::probe_all(std::function<void()> done) {
  open_ = decode_.size() + prefill_.size();
  const auto one_less = [this, done = std::move(done)] {
    if (--open_ == 0) done();
  };
  for (size_t i = 0; i < decode_.size(); ++i) {
    probe(decode_[i], workers_.decode[i], "/health", [this, i, one_less] {
      judge_decode(i);
      one_less();
    });
  }
  for (size_t i = 0; i < prefill_.size(); ++i) {
    probe(prefill_[i], workers_.prefill[i], "/v1/baton/address", [this, i, one_less] {
      judge_prefill(i);
      one_less();
    });
  }
}

void HealthWatch::run() {
  next_ = workers_.loop->after(options_.interval, [this] { probe_all([this] { run(); }); });
}

}  // namespace baton::engine::router
