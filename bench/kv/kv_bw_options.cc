// Parsing and checking the arguments of `baton kv_bw`.
#include "bench/kv/kv_bw.h"

#include <algorithm>
#include <charconv>
#include <iostream>

#include "CLI/CLI.hpp"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "bench/report/bench_memory.h"
#include "bench/report/dialogue.h"
#include "engine/command_line/command_line.h"
#include "engine/command_line/worker_flags.h"

namespace baton::bench {
namespace {

constexpr const char* kFooter = R"(Examples:
  baton kv_bw --provider shm --op both                     4,096 scattered pages of 16 KiB
  baton kv_bw --provider tcp --op read --baselines         the same over tcp, and UCX beside it
  baton kv_bw --model llama3-8b --tokens 8192 --tp 2:1     one request of a real model
  baton kv_bw --listen '*' ... baton kv_bw HOST            two machines, one cluster key
Sizes take K, M and G (powers of 1024). GB/s are 10^9 bytes per second.)";

// "a:b" into two numbers, or false.
bool split_pair(const std::string& text, uint32_t& a, uint32_t& b) {
  const char* end = text.data() + text.size();
  const auto first = std::from_chars(text.data(), end, a);
  if (first.ec != std::errc() || first.ptr == end || *first.ptr != ':') return false;
  const auto second = std::from_chars(first.ptr + 1, end, b);
  return second.ec == std::errc() && second.ptr == end;
}

// Everything that CLI11 cannot check by itself.
absl::Status finish(KvBwOptions& options, const std::string& op, const std::string& tp,
                    const std::string& listen) {
  if (op == "read") options.ops = {Op::kRead};
  if (op == "both") options.ops = {Op::kWrite, Op::kRead};
  if (!tp.empty() && !split_pair(tp, options.workload.tp_source, options.workload.tp_target)) {
    return absl::InvalidArgumentError(
        absl::StrFormat("--tp %s: write SOURCE:TARGET, for example --tp 2:1", tp));
  }
  if (absl::Status status = check_settings(options.settings); !status.ok()) return status;
  if (options.listen) {
    options.listen_port = KvBwOptions::kPort;
    return split_address(listen, options.listen_host, options.listen_port);
  }
  if (!options.host.empty()) {
    auto where = server_address(options.host, KvBwOptions::kPort);
    if (!where.ok()) return where.status();
    options.host = *std::move(where);
  }
  return Workload::make(options.workload).status();
}

}  // namespace

const char* name_of(Op op) { return op == Op::kWrite ? "write" : "read"; }

std::string KvBwOptions::setting(const std::string& key, std::string fallback) const {
  for (const auto& [name, value] : settings) {
    if (name == key) fallback = value;
  }
  return fallback;
}

KvBwCommand parse_kv_bw(int argc, const char* const* argv) {
  KvBwOptions options;
  WorkloadSpec& work = options.workload;
  std::string op = "write", layout = "scattered", tp, listen, memory = "host";
  const std::string name = "baton kv_bw";

  CLI::App app(
      "Moves pages of KV cache between two processes and compares the speed with the hardware's "
      "floor.");
  app.footer(kFooter);
  using engine::command_line::real_number;
  using engine::command_line::whole_number;
  const auto choice = [&](const char* flag, std::string& value,
                          const std::vector<std::string>& values, const char* text) {
    app.add_option(flag, value, text)->check(engine::command_line::one_of(values));
  };
  const auto number = [&](const char* flag, auto& value, uint64_t most, const char* text,
                          const char* unit) {
    return app.add_option(flag, value, text)->check(whole_number(1, most))->type_name(unit);
  };
  const CLI::Validator size = engine::command_line::byte_size();
  app.add_option("HOST", options.host,
                 "a `baton kv_bw --listen` to connect to; default: both "
                 "sides run here")
      ->type_name("HOST[:PORT]");
  engine::command_line::add_provider(app, options.provider,
                                     "provider that moves the bytes (default shm)");
  choice("--op", op, {"write", "read", "both"}, "default write");
  auto* pages = app.add_option("--pages", work.pages, "pages in a transfer (default 4096)")
                    ->transform(size)
                    ->type_name("N");
  auto* page_bytes = app.add_option("--page-bytes", work.page_bytes, "default 16K")
                         ->transform(size)
                         ->type_name("BYTES");
  choice("--layout", layout, {"scattered", "contiguous"}, "default scattered");
  auto* model = app.add_option("--model", work.model,
                               "the KV cache of a model instead of --pages and --page-bytes")
                    ->check(engine::command_line::not_empty())
                    ->type_name("NAME")
                    ->excludes(pages)
                    ->excludes(page_bytes);
  number("--tokens", work.tokens, 1 << 30, "tokens of the request (default 4096)", "T")
      ->needs(model);
  number("--block-tokens", work.block_tokens, 1 << 20, "tokens in a page of the cache (default 16)",
         "B")
      ->needs(model);
  app.add_option("--tp", tp, "tensor-parallel degrees of the two sides (default 1:1)")
      ->type_name("SRC:DST")
      ->needs(model);
  app.add_option("--seconds", options.seconds,
                 "seconds of transfers, and again of the floor (default 2)")
      ->type_name("S")
      ->check(real_number(0.01, 3600));
  number("--iters", options.transfers, uint64_t{1} << 32, "number of transfers instead of seconds",
         "N");
  number("--inflight", options.inflight, 1024, "transfers in flight (default 1)", "K");
  engine::command_line::add_settings(app, options.settings);
  app.add_flag("--baselines,--rivals", options.baselines,
               "measure UCX too (tcp; needs ucx_perftest)");
  app.add_flag("--pin,!--no-pin", options.pin,
               "initiator on the first core, target on the second (default, given two cores)");
  app.add_option("--memory", memory, "host (default), cuda or cuda:N, on the sides that run here")
      ->type_name("KIND");
  app.add_option("--json", options.json, "write one JSON object per row")
      ->check(engine::command_line::writable_file())
      ->type_name("FILE");
  auto* listener =
      app.add_option(
             "--listen", listen,
             absl::StrFormat(
                 "serve as the target for others (default 127.0.0.1:%u; \"*\" for other machines)",
                 KvBwOptions::kPort))
          ->type_name("[HOST:PORT]")
          ->expected(0, 1);
  engine::command_line::add_advertise(app, "--advertise", options.advertise)->needs(listener);
  app.add_flag("--once", options.once, "with --listen: exit when the first initiator has left")
      ->needs(listener);

  const int leave = engine::command_line::parse(app, name, argc, argv);
  if (leave >= 0) return {.options = std::nullopt, .exit_status = leave};
  options.listen = listener->count() > 0;
  work.scattered = layout == "scattered";
  const auto refuse = [&name](const absl::Status& status) {
    std::cerr << name << ": " << status.message() << " (see " << name << " --help)\n";
    return KvBwCommand{.options = std::nullopt, .exit_status = engine::command_line::kUsage};
  };
  const auto device = parse_memory_kind(memory);
  if (!device.ok()) return refuse(device.status());
  options.cuda = *device;
  if (absl::Status status = finish(options, op, tp, listen); !status.ok()) {
    return refuse(status);
  }
  engine::command_line::tell_idle_settings(name, options.settings, {options.provider});
  return {.options = std::move(options), .exit_status = 0};
}

}  // namespace baton::bench
