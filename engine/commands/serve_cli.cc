// `baton serve` and `baton generate`: running what their flags ask for.
#include "engine/commands/serve_cli.h"

#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <functional>
#include <memory>
#include <new>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>

#include "absl/strings/str_cat.h"
#include "engine/command_line/command_line.h"
#include "engine/commands/serve_flags.h"
#include "engine/device/device_model.h"
#include "engine/device/gpu.h"
#include "engine/handoff/checkpoint_digest.h"
#include "engine/handoff/hand_off.h"
#include "engine/http/http_server.h"
#include "engine/kernels/amx.h"
#include "engine/kernels/bf16_dot.h"
#include "engine/kernels/bf16_gemm.h"
#include "engine/router/router.h"
#include "engine/serve/engine.h"
#include "engine/serve/engine_thread.h"
#include "engine/serve/loaded_model.h"
#include "engine/serve/metrics.h"
#include "engine/serve/prometheus_text.h"
#include "engine/shard/follower.h"
#include "engine/shard/leader.h"
#include "kvtransfer/store/store_client.h"
#include "transport/base/durations.h"

namespace baton::engine::commands {
namespace {

int fail(const char* command, const absl::Status& status) {
  std::fprintf(stderr, "baton %s: %s\n", command, std::string(status.message()).c_str());
  return 1;
}

// What computes bf16 arithmetic, for the log.
void report_arithmetic(const Model& model, FILE* to) {
  if (model.arithmetic() != Arithmetic::kBf16) return;
  const Bf16Unit unit = best_bf16_unit();
  std::string why;
  if (unit != Bf16Unit::kTiles) (why += ", without AMX: ") += why_no_amx();
  if (unit == Bf16Unit::kVectors) (why += "; without vdpbf16ps: ") += why_no_dots();
  std::fprintf(to, "arithmetic: bf16, by %s%s\n", unit_name(unit), why.c_str());
}

// Puts a model on the device that --device names; null: the CPU computes.
serve::LoadOnDevice load_on(const std::string& device, Arithmetic arithmetic) {
  const std::optional<int> ordinal = *device::parse_device(device);
  if (!ordinal.has_value()) return nullptr;
  return [=](const Checkpoint& checkpoint) -> absl::StatusOr<serve::OnDevice> {
    auto runner = device::run_on_device(*ordinal, checkpoint, arithmetic);
    if (!runner.ok()) return runner.status();
    return serve::OnDevice{*std::move(runner), std::string(device::device_arithmetic(arithmetic))};
  };
}

void report_device(const ModelRunner* runner, FILE* to) {
  if (runner == nullptr) return;
  std::fprintf(to, "device: %s\n", runner->name().c_str());
}

// How long clients have to take what is written to them at the end.
constexpr std::chrono::seconds kLastWords{2};

// False if none of `signals` came in time.
bool signal_within(const sigset_t& signals, std::chrono::milliseconds time) {
  const timespec left = base::to_timespec(time);
  return sigtimedwait(&signals, nullptr, &left) >= 0;
}

// Blocks until SIGINT or SIGTERM; `signals` must be blocked in all threads. Then requests that are
// under way have `drain` seconds to end by themselves, and those that are left get an error. A
// second signal ends that at once.
template <typename Server>
void serve_until_signal(Server& server, const std::function<double()>& drain,
                        const sigset_t& signals) {
  int first = 0;
  sigwait(&signals, &first);
  server.drain();
  const auto ends_within = [&](std::chrono::duration<double> time) {
    const Time deadline = Clock::steady().now() + std::chrono::duration_cast<Time>(time);
    while (!server.drained()) {
      if (Clock::steady().now() >= deadline) return false;
      if (signal_within(signals, std::chrono::milliseconds(10))) return true;
    }
    return true;
  };
  if (ends_within(std::chrono::seconds(0))) return;
  const double seconds = drain();
  std::printf(
      "draining: requests in progress have %g s to finish (--drain); a second signal ends them\n",
      seconds);
  std::fflush(stdout);
  if (ends_within(std::chrono::duration<double>(seconds))) return;
  server.end_requests();
  ends_within(kLastWords);
}

// What this rank keeps below its cache.
absl::Status use_kv_tiers(ServeFlags& flags, int rank) {
  flags.engine.tiers.host_bytes = flags.kv_host_mib << 20;
  flags.engine.tiers.disk_bytes = static_cast<size_t>(flags.kv_disk_gib * (1 << 30));
  if (flags.kv_store.empty()) return absl::OkStatus();
  kvtransfer::store::StoreClientOptions options;
  options.store = flags.kv_store;
  options.name = absl::StrCat(flags.role, "-", flags.port, "-tiers");
  if (flags.ranks.size > 1) absl::StrAppend(&options.name, "-rank-", rank);
  options.providers = flags.providers;
  options.settings = flags.settings;
  options.load_timeout = flags.engine.tiers.timeout;
  if (!flags.key_file.empty()) {
    absl::StatusOr<ClusterKey> key = ClusterKey::from_file(flags.key_file);
    if (!key.ok()) return key.status();
    options.key = *std::move(key);
  }
  flags.engine.tiers.peer = kvtransfer::store::store_client(std::move(options));
  return absl::OkStatus();
}

// The KV session of one rank of the server; null if it hands no KV to others and takes none.
absl::StatusOr<std::unique_ptr<handoff::HandOff>> make_session(const ServeFlags& flags,
                                                               const Model& model,
                                                               Timeline* timeline) {
  if (flags.role == "all" && flags.kv_agent.empty()) return nullptr;
  const ModelShard shard = model.shard();
  handoff::HandOffOptions options;
  options.shard = {.rank = static_cast<uint32_t>(shard.rank),
                   .ranks = static_cast<uint32_t>(shard.ranks),
                   .heads = static_cast<uint32_t>(model.config().num_kv_heads)};
  int port = flags.kv_port;
  if (flags.kv_agent.empty()) {
    options.name = flags.session_name;
    options.model = model.fingerprint();
    options.worker.listen_host = flags.kv_host.empty() ? flags.host : flags.kv_host;
    options.staging_bytes = size_t{1} << 20;  // for engines of other makes, of which there are none
  } else {
    options.name = flags.kv_agent;
    const size_t colon = flags.kv_agent_address.rfind(':');
    options.host = flags.kv_agent_address.substr(0, colon);
    if (port == 0) port = std::stoi(flags.kv_agent_address.substr(colon + 1));
    options.worker.listen_host = flags.kv_host;
    options.staging_bytes = flags.kv_staging_mib << 20;
    options.model = flags.kv_identity;
    if (options.model.empty()) {
      absl::StatusOr<std::string> digest = handoff::checkpoint_digest(flags.model);
      if (!digest.ok()) return digest.status();
      options.model = *std::move(digest);
    }
  }
  options.port = port == 0 ? uint16_t{0} : static_cast<uint16_t>(port + shard.rank);
  options.fingerprint = model.fingerprint();
  options.lease = std::chrono::duration_cast<Time>(std::chrono::duration<double>(flags.kv_lease));
  options.worker.providers = flags.providers;
  options.worker.settings = flags.settings;
  options.worker.advertise = flags.kv_advertise;
  options.worker.timeline = timeline;
  if (!flags.key_file.empty()) {
    absl::StatusOr<ClusterKey> key = ClusterKey::from_file(flags.key_file);
    if (!key.ok()) return key.status();
    options.worker.key = *std::move(key);
  }
  if (!flags.link.empty()) {
    absl::StatusOr<LinkShape> shape = LinkShape::parse(flags.link);
    if (!shape.ok()) return shape.status();
    options.worker.shape = *shape;
  }
  return handoff::HandOff::create(std::move(options));
}

// Metrics of the worker that moves KV, if there is one.
std::string kv_worker_metrics(const handoff::HandOff* session) {
  if (session == nullptr) return "";
  const serve::NamedWorkerStats worker{"kv_agent", session->stats()};
  return serve::worker_metrics({&worker, 1});
}

http::HttpListenerOptions listener_options(const ServeFlags& flags) {
  http::HttpListenerOptions options;
  options.tls_certificate = flags.tls_certificate;
  options.tls_key = flags.tls_key;
  options.allowed_origins = flags.allowed_origins;
  return options;
}

void report_ready(const ServeFlags& flags, int port) {
  std::printf("ready: %s on %s://%s\n", flags.role.c_str(),
              flags.tls_key.empty() ? "http" : "https",
              http::authority(flags.host, std::to_string(port)).c_str());
  std::fflush(stdout);
}

absl::Status serve_router(const ServeFlags& flags, const sigset_t& signals) {
  absl::StatusOr<std::unique_ptr<router::Router>> router =
      router::Router::start({.host = flags.host,
                             .port = flags.port,
                             .prefill = flags.prefill,
                             .decode = flags.decode,
                             .workers_file = flags.workers,
                             .api_key = flags.api_key,
                             .worker_ca = flags.worker_ca,
                             .listener = listener_options(flags)});
  if (!router.ok()) return router.status();
  report_ready(flags, (*router)->port());
  serve_until_signal(
      **router, [&] { return flags.drain; }, signals);
  return absl::OkStatus();
}

// A rank behind rank 0: until that ends.
absl::Status follow(const ServeFlags& flags, shard::Group& group, const Model& model) {
  auto session = make_session(flags, model, nullptr);
  if (!session.ok()) {
    group.abort(session.status());
    return session.status();
  }
  auto follower = shard::Follower::create(group, model,
                                          {.limits = flags.engine.limits(),
                                           .role = flags.role,
                                           .threads = flags.engine.threads,
                                           .session = session->get(),
                                           .tiers = flags.engine.tiers.of_rank(model.shard())});
  return follower.ok() ? (*follower)->run() : follower.status();
}

absl::Status serve_engine(ServeFlags& flags, const launch::Place& place, const sigset_t& signals) {
  auto group = meet(flags.ranks, place, flags.providers, flags.settings, flags.key_file);
  if (!group.ok()) return group.status();
  const ModelShard shard = *group != nullptr ? (*group)->shard() : ModelShard{};
  absl::StatusOr<serve::LoadedModel> loaded = serve::load_model(
      flags.model, flags.arithmetic, shard, load_on(flags.device, flags.arithmetic));
  if (!loaded.ok()) {
    if (*group != nullptr) (*group)->abort(loaded.status());
    return loaded.status();
  }
  if (absl::Status status = use_kv_tiers(flags, shard.rank); !status.ok()) {
    if (*group != nullptr) (*group)->abort(status);
    return status;
  }
  if (shard.rank > 0) return follow(flags, **group, loaded->model);
  report_arithmetic(loaded->model, stdout);
  flags.engine.runner = loaded->runner.get();
  std::unique_ptr<shard::Leader> leader;
  if (*group != nullptr) {
    auto made = shard::Leader::create(**group, loaded->model, flags.engine.limits(), flags.role,
                                      flags.engine.tiers.of_rank(shard));
    if (!made.ok()) return made.status();
    leader = *std::move(made);
    leader->on_failure([](const absl::Status&) { kill(getpid(), SIGTERM); });  // ends the server
    flags.engine.leader = leader.get();
    std::printf("tensor parallel: %d ranks\n", shard.ranks);
  }
  std::optional<Timeline> timeline;
  if (!flags.timeline.empty()) {
    timeline.emplace(flags.role);
    flags.engine.timeline = &*timeline;
  }
  auto session = make_session(flags, loaded->model, flags.engine.timeline);
  if (!session.ok()) return session.status();
  flags.engine.hand_off = session->get();
  flags.engine.load_timeout =
      std::chrono::duration_cast<Time>(std::chrono::duration<double>(flags.load_timeout));
  flags.engine.load_silence =
      std::chrono::duration_cast<Time>(std::chrono::duration<double>(flags.load_silence));
  flags.engine.on_load_failure = flags.on_load_failure == "fail"
                                     ? serve::LoadFailurePolicy::kFail
                                     : serve::LoadFailurePolicy::kRecompute;
  auto engine = serve::Engine::create(loaded->model, loaded->tokenizer, flags.engine);
  if (!engine.ok()) return engine.status();
  report_device(loaded->runner.get(), stdout);
  {
    flags.admission.max_wait =
        std::chrono::duration_cast<Time>(std::chrono::duration<double>(flags.max_wait));
    serve::EngineThread thread(**engine, flags.admission);
    auto server = http::HttpServer::start(
        {.host = flags.host,
         .port = flags.port,
         .model = flags.served_name.empty() ? loaded->name : flags.served_name,
         .chat_template = loaded->chat_template,
         .defaults =
             flags.generation_config == "auto" ? loaded->defaults : serve::SamplingDefaults{},
         .kv_address = flags.role == "all" ? "" : (*engine)->kv_address(),
         .kv_agent = flags.kv_agent,
         .kv_agent_address = flags.kv_agent.empty() ? "" : (*session)->address(),
         .kv_agent_ranks = shard.ranks,
         .api_key = flags.api_key,
         .stuck_after =
             std::chrono::duration_cast<Time>(std::chrono::duration<double>(flags.stuck_after)),
         .more_metrics = [agent = session->get()] { return kv_worker_metrics(agent); },
         .listener = listener_options(flags)},
        thread, loaded->tokenizer);
    if (!server.ok()) return server.status();
    if ((*engine)->tiers() != nullptr) {
      std::printf("KV tiers: %s\n", (*engine)->tiers()->explain().c_str());
    }
    if (!flags.kv_agent.empty()) {
      std::printf("KV agent: %s at %s\n", flags.kv_agent.c_str(), (*session)->address().c_str());
    }
    report_ready(flags, (*server)->port());
    // Ranks that have failed compute nothing any more: their requests have ended.
    const auto drain = [&] {
      return leader != nullptr && !leader->status().ok() ? 0 : flags.drain;
    };
    serve_until_signal(**server, drain, signals);
  }
  if (leader != nullptr && !leader->status().ok()) return leader->status();
  return timeline.has_value() ? timeline->write(flags.timeline) : absl::OkStatus();
}

// Serves as this rank, and says what went wrong as which.
int serve_rank(ServeFlags& flags, const launch::Place& place, const sigset_t& signals) {
  absl::Status status;
  try {
    status = serve_engine(flags, place, signals);
  } catch (const std::bad_alloc& none) {
    status = absl::ResourceExhaustedError(absl::StrCat(
        "no memory: ", none.what(), "; use a smaller --token-budget or model, or fewer --blocks"));
  }
  if (status.ok()) return 0;
  return fail(place.ranks == 1 ? "serve" : absl::StrCat("serve, rank ", place.rank).c_str(),
              status);
}

absl::StatusOr<int> serve_ranks(ServeFlags& flags, const sigset_t& signals) {
  std::random_device random;  // no other server's session has this name
  flags.session_name =
      absl::StrCat(flags.role, "-", flags.port, "-", absl::Hex(random()), "-", absl::Hex(random()));
  if (flags.kv_port != 0 && flags.kv_port + flags.ranks.size - 1 > UINT16_MAX) {
    return absl::InvalidArgumentError(
        absl::StrCat("--kv-port ", flags.kv_port, ": each of the ", flags.ranks.size,
                     " ranks takes one port from there on, but too few are left"));
  }
  return run_ranks(flags.ranks, flags.model, flags.key_file,
                   [&](const launch::Place& place) { return serve_rank(flags, place, signals); });
}

}  // namespace

int serve_main(int argc, char** argv) {
  ServeFlags flags;
  if (const int status = parse_serve(flags, argc, argv); status >= 0) return status;

  // Blocked here so that every thread inherits it; wait_for_signal() takes them.
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGINT);
  sigaddset(&signals, SIGTERM);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  signal(SIGPIPE, SIG_IGN);
  if (flags.role == "router") {
    const absl::Status status = serve_router(flags, signals);
    return status.ok() ? 0 : fail("serve", status);
  }
  const absl::StatusOr<int> result = serve_ranks(flags, signals);
  return result.ok() ? *result : fail("serve", result.status());
}

int generate_main(int argc, char** argv) {
  std::string directory = serve::default_model();
  std::string prompt = "In the beginning";
  serve::EngineOptions options{.blocks = 256, .threads = 0};
  serve::Request request;
  serve::SamplingParams& sampling = request.sampling;
  sampling = {.temperature = 0.7, .top_k = 40, .seed = std::random_device()(), .max_tokens = 100};
  bool quiet = false;
  CLI::App app("Continues a text.");
  add_model_flag(app, &directory);
  app.add_option("--prompt", prompt, "the text to continue")->capture_default_str();
  app.add_option("--max-tokens", sampling.max_tokens, "most tokens to write")
      ->check(command_line::whole_number(0, INT32_MAX))
      ->capture_default_str();
  app.add_option("--temperature", sampling.temperature,
                 "sampling temperature; 0: always the likeliest token")
      ->check(command_line::real_number(0, 100))
      ->capture_default_str();
  app.add_option("--seed", sampling.seed, "the same seed gives the same text (default: random)")
      ->check(command_line::whole_number(0, UINT64_MAX));
  app.add_option("--top-k", sampling.top_k, "only the k likeliest tokens; 0: all")
      ->check(command_line::whole_number(0, INT32_MAX))
      ->capture_default_str();
  app.add_option("--top-p", sampling.top_p, "only the likeliest tokens with this probability")
      ->check(command_line::real_number(0.001, 1))
      ->capture_default_str();
  app.add_option("--stop", sampling.stop, "stop before this text");
  app.add_flag("--ignore-eos", sampling.ignore_eos, "continue after the end-of-text token");
  app.add_flag("--quiet", quiet, "print no statistics on stderr");
  add_engine_flags(app, &options);
  Arithmetic arithmetic = Arithmetic::kFp32;
  add_arithmetic_flag(app, &arithmetic);
  std::string device = "cpu";
  add_device_flag(app, &device);
  if (const int status = command_line::parse(app, "baton generate", argc, argv); status >= 0) {
    return status;
  }

  const absl::StatusOr<serve::LoadedModel> loaded =
      serve::load_model(directory, arithmetic, {}, load_on(device, arithmetic));
  if (!loaded.ok()) return fail("generate", loaded.status());
  options.runner = loaded->runner.get();
  if (!quiet) report_arithmetic(loaded->model, stderr);
  auto engine = serve::Engine::create(loaded->model, loaded->tokenizer, options);
  if (!engine.ok()) return fail("generate", engine.status());
  if (!quiet) report_device(options.runner, stderr);
  request.tokens = loaded->tokenizer.encode(prompt);
  absl::Status outcome;
  serve::RequestMetrics metrics;
  request.on_event = [&](const serve::OutputEvent& event) {
    std::fputs(event.text.c_str(), stdout);
    std::fflush(stdout);
    if (!event.finished) return;
    outcome = event.status;
    metrics = *event.metrics;
  };
  if (absl::Status status = (*engine)->add_request(std::move(request)); !status.ok()) {
    return fail("generate", status);
  }
  std::fputs(prompt.c_str(), stdout);
  while ((*engine)->has_work()) (*engine)->step();
  std::fputs("\n", stdout);
  if (!outcome.ok()) return fail("generate", outcome);
  if (!quiet) {
    const double ms = 1e-6;
    std::fprintf(stderr,
                 "%u prompt tokens, %u output tokens, first after %.2f ms, then %.3f ms each\n",
                 metrics.prompt_tokens, metrics.output_tokens,
                 static_cast<double>(metrics.ttft().count()) * ms,
                 static_cast<double>(metrics.tpot().count()) * ms);
  }
  return 0;
}

}  // namespace baton::engine::commands
