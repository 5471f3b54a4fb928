// A worker process of the demo: a model, and an engine with a session between start and stop.
#include <poll.h>
#include <sched.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "engine/demo/demo_process.h"
#include "engine/handoff/hand_off.h"
#include "engine/serve/loaded_model.h"

namespace baton::engine::demo {
namespace {

using nlohmann::json;

double ms(Time time) { return static_cast<double>(time.count()) * 1e-6; }

class DemoWorker {
 public:
  DemoWorker(const DemoProcessOptions& options, int socket) : options_(options), socket_(socket) {}

  void serve() {
    std::string buffer;
    for (;;) {
      pollfd entry{socket_, POLLIN, 0};
      if (poll(&entry, 1, engine_ != nullptr ? 0 : -1) > 0) {
        const absl::StatusOr<json> command = receive_line(socket_, &buffer);
        if (!command.ok()) return;
        absl::StatusOr<json> reply = handle(*command);
        if (!reply.ok()) reply = json{{"error", std::string(reply.status().message())}};
        if (!send_line(socket_, *reply).ok()) return;
      } else if (!engine_->step()) {
        engine_->wait(std::chrono::milliseconds(100), socket_);
      }
    }
  }

 private:
  absl::StatusOr<json> handle(const json& command) {
    const std::string what = command.value("do", "");
    if (what == "start") return start(command);
    if (engine_ == nullptr) return absl::FailedPreconditionError("send start first");
    if (what == "run") return run(command);
    if (what == "stop") return stop();
    return absl::InvalidArgumentError("unknown command " + what);
  }

  absl::StatusOr<json> start(const json& command) {
    if (!model_.has_value()) {
      absl::StatusOr<serve::LoadedModel> loaded = serve::load_model(options_.model);
      if (!loaded.ok()) return loaded.status();
      model_.emplace(*std::move(loaded));
    }
    engine_.reset();
    session_.reset();
    timeline_ = std::make_unique<Timeline>(options_.name);
    if (options_.session) {
      handoff::HandOffOptions options;
      options.name = options_.name;
      options.model = options.fingerprint = model_->model.fingerprint();
      options.shard.heads = static_cast<uint32_t>(model_->model.config().num_kv_heads);
      options.staging_bytes = size_t{1} << 20;
      options.worker.providers = command["providers"].get<std::vector<std::string>>();
      options.worker.settings = command["settings"].get<SettingValues>();
      absl::StatusOr<ClusterKey> key = ClusterKey::from_bytes(options_.secret);
      if (!key.ok()) return key.status();
      options.worker.key = *std::move(key);
      const std::string link = command["link"];
      if (!link.empty() && options_.name == "prefill") {  // the side that sends
        absl::StatusOr<LinkShape> shape = LinkShape::parse(link);
        if (!shape.ok()) return shape.status();
        options.worker.shape = *shape;
      }
      options.worker.timeline = timeline_.get();
      auto session = handoff::HandOff::create(std::move(options));
      if (!session.ok()) return session.status();
      session_ = *std::move(session);
    }
    // Without the prefix cache: every run computes and moves its whole prompt.
    serve::EngineOptions options{.blocks = 1024,
                                 .prefix_cache = false,
                                 .threads = 1,
                                 .hand_off = session_.get(),
                                 .serialize_sends = command.value("serialized", false),
                                 .timeline = timeline_.get()};
    auto engine = serve::Engine::create(model_->model, model_->tokenizer, options);
    if (!engine.ok()) return engine.status();
    engine_ = *std::move(engine);
    return json{{"address", engine_->kv_address()}, {"context", engine_->max_context()}};
  }

  absl::StatusOr<json> run(const json& command) {
    std::vector<json> outcomes(command["requests"].size());
    const bool together = command["together"];
    for (size_t i = 0; i < outcomes.size(); ++i) {
      const json& given = command["requests"][i];
      serve::Request request;
      request.id = next_id_++;
      request.tokens = given["tokens"].get<std::vector<int32_t>>();
      request.prefill_address = command["prefill"];
      request.sampling.max_tokens = given["max_tokens"];
      request.sampling.temperature = given["temperature"];
      request.sampling.top_k = 40;
      request.sampling.seed = given["seed"];
      request.sampling.ignore_eos = true;
      json& outcome = outcomes[i];
      outcome = {{"tokens", json::array()}};
      request.on_event = [&outcome](const serve::OutputEvent& event) {
        if (event.has_token) outcome["tokens"].push_back(event.choice.token);
        if (!event.finished) return;
        const serve::RequestMetrics& metrics = *event.metrics;
        outcome["ttft_ms"] = ms(metrics.ttft());
        outcome["loaded_tokens"] = metrics.loaded_tokens;
        const absl::Status& error = event.status.ok() ? metrics.load_error : event.status;
        outcome["error"] = std::string(error.message());
      };
      if (absl::Status status = engine_->add_request(std::move(request)); !status.ok()) {
        return status;
      }
      if (!together) finish();
    }
    finish();
    return json{{"outcomes", outcomes}};
  }

  void finish() {
    while (engine_->has_work()) {
      if (!engine_->step()) engine_->wait(std::chrono::milliseconds(10), -1);
    }
  }

  absl::StatusOr<json> stop() {
    finish();
    const uint64_t bytes = engine_->stats().kv_bytes_sent;
    const std::string route =
        session_ != nullptr ? session_->agent()->explain("prefill/0") : "";  // of decode
    engine_.reset();
    session_.reset();
    return json{
        {"timeline", json::parse(timeline_->to_json())}, {"route", route}, {"bytes", bytes}};
  }

  const DemoProcessOptions options_;
  const int socket_;
  std::optional<serve::LoadedModel> model_;
  std::unique_ptr<Timeline> timeline_;
  std::unique_ptr<handoff::HandOff> session_;
  std::unique_ptr<serve::Engine> engine_;
  uint64_t next_id_ = 1;
};

}  // namespace

void run_demo_worker(const DemoProcessOptions& options, int socket) {
  cpu_set_t cpus;
  CPU_ZERO(&cpus);
  CPU_SET(options.cpu, &cpus);
  sched_setaffinity(0, sizeof(cpus), &cpus);  // refused: slower, not wrong
  DemoWorker(options, socket).serve();
}

}  // namespace baton::engine::demo
