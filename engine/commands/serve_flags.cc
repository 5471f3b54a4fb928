// The flags of the serving commands, and which of them belong to which role.
#include "engine/commands/serve_flags.h"

#include <algorithm>
#include <iostream>
#include <map>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "engine/command_line/command_line.h"
#include "engine/command_line/worker_flags.h"
#include "engine/device/gpu.h"
#include "engine/http/http_fetch.h"

namespace baton::engine::commands {
namespace {

using command_line::not_empty;
using command_line::one_of;
using command_line::readable_file;
using command_line::real_number;
using command_line::whole_number;

constexpr double kDay = 86400;  // seconds

// Adds a flag whose words stand for values, the first of them by default.
template <typename T>
void add_choice(CLI::App& app, const char* flag, T* value,
                const std::vector<std::pair<std::string, T>>& choices, const char* text) {
  std::vector<std::string> words;
  for (const auto& [word, meant] : choices) words.push_back(word);
  const std::map<std::string, T> values(choices.begin(), choices.end());
  app.add_option_function<std::string>(
         flag, [=](const std::string& word) { *value = values.at(word); }, text)
      ->check(one_of(words))
      ->default_str(words.front());
}

CLI::Validator worker() {
  return {
      [](std::string& text) { return std::string(http::HttpUrl::parse(text).status().message()); },
      ""};
}

CLI::Validator host_and_port() {
  return {[](std::string& text) -> std::string {
            const size_t colon = text.rfind(':');
            const std::string port = colon == std::string::npos ? "" : text.substr(colon + 1);
            if (colon > 0 && whole_number(1, 65535)(port).empty()) return "";
            return absl::StrCat("\"", text, "\" has no port from 1 to 65535: write HOST:PORT");
          },
          ""};
}

// "ORIGIN,ORIGIN", or a JSON list of them, as vLLM's flag has it.
absl::StatusOr<std::vector<std::string>> origins_in(const std::string& text) {
  std::vector<std::string> origins = absl::StrSplit(text, ',');
  if (text.starts_with('[')) {
    const auto list = nlohmann::json::parse(text, nullptr, false);
    const bool good = list.is_array() && std::all_of(list.begin(), list.end(), [](const auto& one) {
                        return one.is_string();
                      });
    if (!good) return absl::InvalidArgumentError("it must be a JSON list of strings");
    origins = list.get<std::vector<std::string>>();
  }
  for (const std::string& origin : origins) {
    if (origin == "*") continue;
    const size_t scheme = origin.find("://");
    const std::string host = scheme == std::string::npos ? "" : origin.substr(scheme + 3);
    if (scheme == 0 || host.empty() || host.find_first_of("/?# *") != std::string::npos) {
      return absl::InvalidArgumentError(absl::StrCat(
          "\"", origin, "\" is not an origin: write SCHEME://HOST or SCHEME://HOST:PORT, or *"));
    }
  }
  return origins;
}

void add_http_flags(CLI::App& app, ServeFlags& flags) {
  app.add_option("--host", flags.host, "address to listen on for HTTP; \"*\": all")
      ->check(command_line::host())
      ->type_name("HOST")
      ->capture_default_str();
  app.add_option("--port", flags.port, "port to listen on for HTTP; 0: any")
      ->check(command_line::port())
      ->capture_default_str();
  app.add_option("--served-model-name", flags.served_name,
                 "what clients call the model (default: the folder's last part)")
      ->check(not_empty())
      ->type_name("NAME");
  app.add_option("--api-key", flags.api_key,
                 "key that clients must send as a bearer token; the router sends it to its workers "
                 "too (default: $BATON_API_KEY, else none)")
      ->check(not_empty())
      ->type_name("KEY")
      ->envname("BATON_API_KEY");
  auto* certificate = app.add_option("--tls-cert", flags.tls_certificate,
                                     "serve HTTPS: a PEM file with the certificate and its chain")
                          ->check(readable_file())
                          ->type_name("FILE");
  auto* key = app.add_option("--tls-key", flags.tls_key, "... and one with its private key")
                  ->check(readable_file())
                  ->type_name("FILE");
  certificate->needs(key);
  key->needs(certificate);
  app.add_option_function<std::vector<std::string>>(
         "--allowed-origins",
         [&flags](const std::vector<std::string>& words) {
           for (const std::string& word : words) {
             auto origins = *origins_in(word);  // checked below
             for (std::string& origin : origins) flags.allowed_origins.push_back(std::move(origin));
           }
         },
         "pages of these origins may call this server from a browser (CORS), such as "
         "https://chat.example; *: all (default: none)")
      ->allow_extra_args(false)
      ->check(CLI::Validator(
          [](std::string& text) { return std::string(origins_in(text).status().message()); }, ""))
      ->type_name("ORIGIN[,ORIGIN]");
  app.add_option("--drain", flags.drain,
                 "seconds for requests in progress to finish after SIGTERM or SIGINT, while new "
                 "ones get 503; 0: they get an error at once")
      ->check(real_number(0, kDay))
      ->capture_default_str();
  app.add_option("--generation-config", flags.generation_config,
                 "defaults for a request without temperature, top_p, top_k, ...: auto, those of "
                 "the model's generation_config.json; none, OpenAI's")
      ->check(one_of({"auto", "none"}))
      ->capture_default_str();
  app.add_option("--stuck-after", flags.stuck_after,
                 "seconds without progress, not even by a layer, after which /health is 503 while "
                 "the engine has work; 0: never")
      ->check(real_number(0, kDay))
      ->capture_default_str();
  app.add_option("--max-waiting", flags.admission.max_waiting,
                 "most requests in the queue; more get 429. 0: no queue, so a request without a "
                 "place in the batch gets 429")
      ->check(whole_number(0, 1 << 24))
      ->capture_default_str();
  app.add_option("--max-wait", flags.max_wait,
                 "refuse requests expected to take longer than this many seconds to a stream's "
                 "first token or a whole answer; 0: longer than clients are seen to wait")
      ->check(real_number(0, kDay))
      ->capture_default_str();
}

void add_role_flags(CLI::App& app, ServeFlags& flags) {
  app.add_option("--role", flags.role, "the server's role")
      ->check(one_of({"all", "prefill", "decode", "router"}))
      ->capture_default_str();
  app.add_option("--min-remote-tokens", flags.engine.min_remote_tokens,
                 "decode: compute prompts with fewer tokens than this here")
      ->check(whole_number(0, 1 << 24))
      ->capture_default_str();
  app.add_option("--load-timeout", flags.load_timeout,
                 "decode: time limit in seconds for a prompt's KV to arrive")
      ->check(real_number(0.1, kDay))
      ->capture_default_str();
  app.add_option("--load-silence", flags.load_silence,
                 "decode: ... and for a prefill worker to send a sign of life; 0: no limit")
      ->check(real_number(0, kDay))
      ->capture_default_str();
  app.add_flag(
      "--kv-push,!--kv-pull", flags.engine.push,
      "decode: prefill writes a prompt's KV into this server's cache, or this server reads "
      "it from prefill's (default: what this server asked for is written, what was handed "
      "over by vLLM's kv_transfer_params is read)");
  app.add_option("--on-load-failure", flags.on_load_failure,
                 "decode: recompute a prompt whose KV does not arrive, or fail the request")
      ->check(one_of({"recompute", "fail"}))
      ->capture_default_str();
}

void add_tier_flags(CLI::App& app, ServeFlags& flags) {
  app.add_option("--kv-host-mib", flags.kv_host_mib,
                 "keep KV that has no room in the cache: MiB of host memory, split among "
                 "tensor-parallel ranks, like the sizes below")
      ->check(whole_number(0, 1 << 30));
  auto* disk = app.add_option("--kv-disk", flags.engine.tiers.disk,
                              "... and on disk: a folder used by this server only")
                   ->check(command_line::writable_folder())
                   ->type_name("DIR");
  auto* disk_size = app.add_option("--kv-disk-gib", flags.kv_disk_gib, "... GiB to use there")
                        ->check(real_number(0.001, 1e6));
  disk->needs(disk_size);
  disk_size->needs(disk);
  app.add_option("--kv-store", flags.kv_store,
                 "... and in a process that several servers share: address of a `baton kv_store`")
      ->check(host_and_port())
      ->type_name("HOST:PORT");
  app.add_option("--kv-salt", flags.engine.tiers.salt,
                 "only servers with the same salt find each other's KV");
}

void add_transfer_flags(CLI::App& app, ServeFlags& flags) {
  app.add_option("--kv-host", flags.kv_host,
                 "address to listen on for KV (default: that of --host)")
      ->check(command_line::host())
      ->type_name("HOST");
  app.add_option("--kv-port", flags.kv_port,
                 "port to listen on for KV, of rank 0; each further rank takes the next; 0: any")
      ->check(command_line::port());
  command_line::add_advertise(app, "--kv-advertise", flags.kv_advertise);
  command_line::add_key_file(app, flags.key_file);
  command_line::add_providers(app, flags.providers);
  command_line::add_settings(app, flags.settings);
  command_line::add_link(app, flags.link);
  app.add_option("--timeline", flags.timeline, "write a Perfetto timeline at the end")
      ->check(command_line::writable_file())
      ->type_name("FILE");
}

// Flags for pairs with vLLM, and other engines with its kv_transfer_params: docs/vllm.md.
void add_hand_off_flags(CLI::App& app, ServeFlags& flags) {
  auto* name = app.add_option("--kv-agent", flags.kv_agent,
                              "take part in pairs by vLLM's kv_transfer_params (do_remote_decode, "
                              "do_remote_prefill), under this name")
                   ->check(not_empty())
                   ->type_name("NAME");
  auto* address = app.add_option("--kv-agent-address", flags.kv_agent_address,
                                 "... address where the other engine reaches it")
                      ->check(host_and_port())
                      ->type_name("HOST:PORT");
  name->needs(address);
  address->needs(name);
  app.add_option("--kv-identity", flags.kv_identity,
                 "... name of the checkpoint, the same on every engine that serves it (default: "
                 "SHA-256 of its files)")
      ->check(not_empty())
      ->type_name("NAME")
      ->needs(name);
  app.add_option("--kv-lease", flags.kv_lease,
                 "... seconds to keep a prompt's KV that no engine fetches")
      ->check(real_number(0.1, kDay))
      ->needs(name)
      ->capture_default_str();
  app.add_option("--kv-staging-mib", flags.kv_staging_mib,
                 "... MiB to stage blocks between the two engines' layouts, on prefill until "
                 "decode has read them")
      ->check(whole_number(1, 1 << 24))
      ->needs(name)
      ->capture_default_str();
}

// Those that only a router reads.
std::vector<const CLI::Option*> add_router_flags(CLI::App& app, ServeFlags& flags) {
  std::vector<const CLI::Option*> added;
  added.push_back(
      app.add_option(
             "--prefill", flags.prefill,
             "router: URLs of prefill workers, Baton's or vLLM's, which the router tells apart")
          ->check(worker())
          ->type_name("URL"));
  added.push_back(
      app.add_option("--decode", flags.decode, "router: URLs of decode workers, likewise")
          ->check(worker())
          ->type_name("URL"));
  added.push_back(
      app.add_option("--workers", flags.workers,
                     "router: a file that lists them instead, a line each: prefill URL or decode "
                     "URL; workers join and leave as it changes")
          ->check(readable_file())
          ->type_name("FILE"));
  added.push_back(app.add_option("--worker-ca", flags.worker_ca,
                                 "router: a PEM file of CAs for workers whose URL is https "
                                 "(default: those that the system trusts)")
                      ->check(readable_file())
                      ->type_name("FILE"));
  return added;
}

// What a device cannot do yet, in one line each.
absl::Status check_device(const ServeFlags& flags) {
  if (flags.device == "cpu") return absl::OkStatus();
  const auto refuse = [&](const char* what) {
    return absl::InvalidArgumentError(absl::StrCat("--device ", flags.device, ": ", what));
  };
  if (flags.role == "router") {
    return refuse("a router computes nothing: leave it out");
  }
  if (flags.ranks.size > 1) {
    return refuse("tensor-parallel ranks compute on the CPU: leave out --tensor-parallel-size");
  }
  return absl::OkStatus();
}

// A router's flag given to another role would be ignored, and the wrong server started.
absl::Status check_role(const ServeFlags& flags, const std::vector<const CLI::Option*>& of_router) {
  if (flags.role == "router") {
    if (flags.kv_agent.empty()) return absl::OkStatus();
    return absl::InvalidArgumentError("--kv-agent is for servers that compute: leave it out here");
  }
  for (const CLI::Option* option : of_router) {
    if (option->count() == 0) continue;
    return absl::InvalidArgumentError(
        absl::StrCat(option->get_name(), " is for a router: add --role router, or leave it out"));
  }
  return absl::OkStatus();
}

}  // namespace

void add_model_flag(CLI::App& app, std::string* directory) {
  app.add_option("--model", *directory,
                 "the model's folder (default: the small one of Baton's own)")
      ->type_name("DIR");
}

void add_engine_flags(CLI::App& app, serve::EngineOptions* engine) {
  app.add_option("--blocks", engine->blocks, "KV cache size, in blocks of 16 tokens")
      ->check(whole_number(1, 1 << 24))
      ->capture_default_str();
  app.add_option("--token-budget", engine->token_budget, "most tokens computed per step")
      ->check(whole_number(1, 1 << 20))
      ->capture_default_str();
  app.add_option("--max-seqs", engine->max_sequences, "most requests in one step")
      ->check(whole_number(1, 1 << 16))
      ->capture_default_str();
  app.add_option("--threads", engine->threads, "compute threads; 0: one per CPU")
      ->check(whole_number(0, 1024))
      ->capture_default_str();
  app.add_flag("--prefix-cache,!--no-prefix-cache", engine->prefix_cache,
               "reuse the KV of prompts that begin alike (default)");
}

void add_arithmetic_flag(CLI::App& app, Arithmetic* arithmetic) {
  add_choice<Arithmetic>(
      app, "--arithmetic", arithmetic, {{"fp32", Arithmetic::kFp32}, {"bf16", Arithmetic::kBf16}},
      "arithmetic of matrix products: fp32, or bf16, which rounds the factors and is quicker with "
      "AMX or AVX-512 BF16; use the same on all workers that share KV");
}

void add_device_flag(CLI::App& app, std::string* device) {
  app.add_option("--device", *device,
                 "where to compute: cpu; or cuda or cuda:N, a GPU, which then holds the weights "
                 "and the KV cache")
      ->check(CLI::Validator(
          [](std::string& text) {
            return std::string(device::parse_device(text).status().message());
          },
          ""))
      ->type_name("cpu|cuda[:N]")
      ->capture_default_str();
}

int parse_serve(ServeFlags& flags, int argc, char** argv) {
  const std::string name = "baton serve";
  CLI::App app("Serves a model over HTTP, alone or as one part of a prefill/decode pair.");
  add_model_flag(app, &flags.model);
  add_role_flags(app, flags);
  add_http_flags(app, flags);
  add_engine_flags(app, &flags.engine);
  add_arithmetic_flag(app, &flags.arithmetic);
  add_device_flag(app, &flags.device);
  add_rank_flags(app, &flags.ranks);
  add_tier_flags(app, flags);
  add_transfer_flags(app, flags);
  add_hand_off_flags(app, flags);
  const std::vector<const CLI::Option*> of_router = add_router_flags(app, flags);
  std::vector<char*> words = with_long_names(argc, argv);
  if (const int status = command_line::parse(app, name, argc, words.data()); status >= 0) {
    return status;
  }
  absl::Status status = check_role(flags, of_router);
  if (status.ok()) status = check_device(flags);
  if (!status.ok()) {
    std::cerr << name << ": " << status.message() << " (see " << name << " --help)\n";
    return command_line::kUsage;
  }
  command_line::tell_idle_settings(name, flags.settings, flags.providers);
  return -1;
}

}  // namespace baton::engine::commands
