// Parsing and checking the arguments of the perftest-shaped commands.
#include "bench/perftest/perf_options.h"

#include <algorithm>
#include <array>
#include <iostream>
#include <string_view>

#include "CLI/CLI.hpp"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "bench/report/dialogue.h"
#include "engine/command_line/command_line.h"
#include "engine/command_line/worker_flags.h"
#include "transport/provider.h"

namespace baton::bench {
namespace {

constexpr size_t kAllLast = size_t{1} << 23;
constexpr const char* kJsonName = "perftest_out.json";
using Verb = PerfTest::Verb;

constexpr const char* kFooter =
    R"(No HOST: a server for one client, for any of the six tests. Flags of the test go on the client.
Examples:
  baton write_bw                                  the server; with --keep, until Ctrl-C
  baton write_bw -d mlx5_0 -x 3 -F --report_gbits HOST
  baton write_lat -a --provider tcp HOST          every size over tcp
  baton send_bw --provider shm --loopback         both sides on this machine
Sizes take K, M and G (powers of 1024). MiB/sec are 2^20, Gb/sec 10^9 bits.)";

constexpr const char* kWhatASendIs =
    R"(A send: the receiver has receives open (-r). Each message takes one, lands in its buffer uncopied and is
told by a counter; send_bw sends no more than the receiver's program has taken in. Over verbs it is one
RDMA write with immediate, which uses up a receive and completes there, where perftest has SEND.
)";

// A flag that becomes a setting of the provider.
struct SettingFlag {
  const char* flag;
  const char* setting;
  const char* text;
  uint64_t least;
  uint64_t most;
};
constexpr std::array kKnobs = {
    SettingFlag{"-S,--sl", "verbs.service_level", "service level", 0, 15},
    SettingFlag{"--tclass", "verbs.traffic_class", "traffic class", 0, 255},
    SettingFlag{"-T,--tos", "verbs.traffic_class", "the same as --tclass", 0, 255},
    SettingFlag{"-u,--qp-timeout", "verbs.timeout", "4.096 us * 2^N until a retry", 1, 31},
    SettingFlag{"--retry_count", "verbs.retry_count", "retries until a peer is given up", 0, 7},
};

// Flags that say something of queue pairs and their devices.
constexpr std::array kOfQueuePairs = {"-d",
                                      "-i",
                                      "-I",
                                      "-m",
                                      "-o",
                                      "-O",
                                      "-S",
                                      "--tclass",
                                      "-T",
                                      "-u",
                                      "--retry_count",
                                      "-x",
                                      "--disable_pcie_relaxed"};

// "mlx5_0,mlx5_1:2" and port 3: "mlx5_0:3,mlx5_1:2".
std::string devices_with_port(const std::string& devices, const std::optional<uint64_t>& port) {
  if (!port) return devices;
  std::vector<std::string> out;
  for (const auto device : absl::StrSplit(devices, ',')) {
    out.emplace_back(device);
    if (out.back().find(':') == std::string::npos) absl::StrAppend(&out.back(), ":", *port);
  }
  return absl::StrJoin(out, ",");
}

void set_sizes(bool all, size_t size, PerfOptions& options) {
  if (options.test.verb == Verb::kSend) {
    options.notes.push_back(
        absl::StrCat("a message takes a receive of the other side, lands in its buffer and is "
                     "signalled by a counter",
                     options.client_provider() == "verbs"
                         ? "; by RDMA write with immediate, where perftest has SEND"
                         : ""));
  }
  if (!all) {
    options.sizes = {size};
    return;
  }
  for (size_t bytes = 2; bytes <= kAllLast; bytes *= 2) options.sizes.push_back(bytes);
}

// Everything that CLI11 cannot check by itself.
absl::Status finish(PerfOptions& options, const std::string& connection, bool margin_given) {
  if (connection != "RC") {
    return absl::InvalidArgumentError(absl::StrFormat(
        "-c %s: queue pairs are reliable connections here; leave it out, or -c RC", connection));
  }
  if (absl::Status status = check_settings(options.settings); !status.ok()) return status;
  for (const size_t size : options.sizes) {
    if (size == 0 || size > PerfPlan::kMaxArea / 2) {
      return absl::InvalidArgumentError(
          absl::StrFormat("-s %u: give a size from 1 to %u", size, PerfPlan::kMaxArea / 2));
    }
  }
  if (options.test.latency && options.bidirectional) {
    return absl::InvalidArgumentError("-b is for the bandwidth tests; latency tests go both ways");
  }
  if (options.immediate && options.test.verb != Verb::kWrite) {
    return absl::InvalidArgumentError("--write_with_imm is for write_bw and write_lat");
  }
  if (options.events && options.test.latency && options.test.verb == Verb::kWrite &&
      !options.immediate) {
    options.immediate = true;
    options.notes.emplace_back(
        "a plain write does not wake the other side: with -e a counter signals its arrival");
  }
  if (options.dma_buf && !options.cuda) {
    return absl::InvalidArgumentError("--use_cuda_dmabuf goes with --use_cuda=N");
  }
  if (options.cuda && options.huge_pages) {
    return absl::InvalidArgumentError("--use_hugepages is for memory of the host, not --use_cuda");
  }
  if (options.cuda && options.test.latency && options.test.verb == Verb::kWrite) {
    options.immediate = true;
    options.notes.emplace_back("no CPU sees device memory change: a counter signals arrivals");
  }
  if (options.post_list > options.depth) {
    return absl::InvalidArgumentError(absl::StrFormat("-l %u: at most -t, which is %u; raise -t",
                                                      options.post_list, options.depth));
  }
  if (options.endless && options.duration == 0) options.duration = 5;
  if (options.endless) {
    options.margin = 0;
    if (options.sizes.size() > 1) {
      return absl::InvalidArgumentError("--run_infinitely is for one size: -s instead of -a");
    }
  } else if (options.duration <= 2 * options.margin && options.duration > 0) {
    if (margin_given) {
      return absl::InvalidArgumentError(
          absl::StrFormat("-D %g: must be longer than the margins at both ends (-f %g)",
                          options.duration, options.margin));
    }
    options.margin = options.duration / 10;
  }
  if (options.output == "latency" && !options.test.latency) {
    return absl::InvalidArgumentError("--output=latency is for the latency tests");
  }
  if (!options.output.empty() && options.output != "latency" && options.test.latency) {
    return absl::InvalidArgumentError("a latency test needs --output=latency");
  }
  return absl::OkStatus();
}

// The error for arguments that no command knows.
std::string complaint(const CLI::App& app, const std::vector<std::string>& unknown) {
  for (const std::string& argument : unknown) {
    if (argument.size() < 2 || argument[0] != '-') continue;
    const std::string instead = instead_of(argument);
    if (instead.empty()) {
      return absl::StrCat("there is no flag ", argument,
                          engine::command_line::did_you_mean_flag(app, argument));
    }
    return absl::StrFormat("perftest's %s is not supported: %s", argument, instead);
  }
  return absl::StrFormat("too many arguments: \"%s\"", unknown.front());
}

}  // namespace

PerfCommand parse_perf(const PerfTest& test, int argc, const char* const* argv) {
  PerfOptions options;
  options.test = test;
  options.margin = PerfOptions::kMargin;
  options.depth = test.latency ? 1 : 128;
  options.iterations = test.verb == Verb::kWrite && !test.latency ? 5000 : 1000;
  size_t size = test.latency ? 2 : 65536;
  bool all = false, quiet = false, validation = false, warm = false, out_json = false;
  bool strict_order = false, no_verify = false, no_peak = false, once = false, version = false;
  bool by_cm = false, rdma_cm = false, histogram = false, unsorted = false, cycles = false,
       dual_port = false;
  std::string counters;
  std::string connection = "RC", host, out_json_file;
  std::array<std::optional<uint64_t>, kKnobs.size()> knobs;
  std::optional<uint64_t> ib_port;

  const std::string name = "baton " + test.name();
  CLI::App app(test.latency ? "Measures latency the way perftest does, over any provider."
                            : "Measures bandwidth the way perftest does, over any provider.");
  app.footer(test.verb == Verb::kSend ? absl::StrCat(kWhatASendIs, kFooter) : kFooter);
  app.allow_extras(true);
  using engine::command_line::one_of;
  using engine::command_line::real_number;
  using engine::command_line::whole_number;
  const auto number = [&](const char* flag, auto& value, uint64_t least, uint64_t most,
                          const char* text) {
    return app.add_option(flag, value, text)->check(whole_number(least, most))->type_name("N");
  };

  app.add_option("HOST", host, "the server's host; default: run as the server")
      ->type_name("HOST[:PORT]");
  app.add_flag("-a,--all", all, "sizes from 2 to 2^23");
  app.add_flag("-b,--bidirectional", options.bidirectional, "both sides send");
  app.add_option("-c,--connection", connection, "only RC")->type_name("RC");
  app.add_option("-d,--ib-dev", options.device, "device, or several (default: the best)")
      ->type_name("DEV[,DEV]");
  auto* duration = app.add_option("-D,--duration", options.duration, "seconds, instead of -n")
                       ->check(real_number(0.01, 1e6))
                       ->type_name("S");
  app.add_flag("-e,--events", options.events, "sleep until an event comes (default: poll)");
  auto* margin = app.add_option("-f,--margin", options.margin,
                                "with -D: seconds at each end that do not count (default 2)")
                     ->check(real_number(0, 1e6))
                     ->type_name("S");
  app.add_flag("-C,--report-cycles", cycles, "no effect: times stay in microseconds");
  app.add_flag("-F,--CPU-freq", quiet, "accepted; there is no such warning to silence");
  app.add_flag("-H,--report-histogram", histogram, "no effect: --json FILE holds the percentiles");
  number("-i,--ib-port", ib_port, 1, 255, "port of the device (default 1)");
  number("-I,--inline_size", options.inline_size, 0, 1024, "largest message sent inline");
  number("-l,--post_list", options.post_list, 1, PerfPlan::kMaxDepth, "messages posted together");
  app.add_option("-m,--mtu", options.mtu, "path MTU")
      ->check(one_of({"256", "512", "1024", "2048", "4096"}));
  number("-n,--iters", options.iterations, 5, uint64_t{1} << 32,
         "messages (default 1000; write_bw 5000)")
      ->excludes(duration);
  app.add_flag("-N,--noPeak", no_peak, "measure neither the peak nor each message");
  number("-o,--outs", options.outs, 1, 255, "reads outstanding at the device");
  app.add_flag("-O,--dualport", dual_port, "ports 1 and 2 of the device of -d");
  number("-p,--port", options.port, 0, 65535, "port to listen on or connect to (default 18515)");
  number("-q,--qp", options.streams, 1, 64, "queue pairs; sockets over tcp (default 1)");
  number("-Q,--cq-mod", options.cq_mod, 1, 1024,
         "no effect: the provider chooses how often it signals");
  auto* receives = number(
      "-r,--rx-depth", options.receives, 16, PerfPlan::kMaxReceives,
      "receives posted; for send_bw, messages that the receiver has not processed (default 512)");
  app.add_flag("-R,--rdma_cm", rdma_cm, "no effect: queue pairs are connected over TCP");
  app.add_option("-s,--size", size, "bytes of a message (default 65536; latency 2)")
      ->transform(engine::command_line::byte_size())
      ->type_name("BYTES");
  number("-t,--tx-depth", options.depth, 1, PerfPlan::kMaxDepth,
         "messages in flight (default 128; latency 1)");
  for (size_t i = 0; i < kKnobs.size(); ++i) {
    number(kKnobs[i].flag, knobs[i], kKnobs[i].least, kKnobs[i].most, kKnobs[i].text);
  }
  app.add_flag("-U,--report-unsorted", unsorted, "no effect, as -H");
  app.add_flag("-V,--version", version, "print the version and exit");
  app.add_option("-W,--report-counters", counters, "no effect: `baton info` shows the counters")
      ->type_name("NAMES");
  app.add_option("-w,--limit_bw", options.limit_bw, "exit 1 below this average")
      ->check(real_number(0, 1e9))
      ->type_name("BW");
  number("-x,--gid-index", options.gid_index, 0, 255, "GID of the port (default: the best)");
  app.add_option("-y,--limit_msgrate", options.limit_msgrate, "exit 1 below this [Mpps]")
      ->check(real_number(0, 1e9))
      ->type_name("RATE");
  app.add_flag("-z,--comm_rdma_cm", by_cm, "no effect: addresses are exchanged over TCP");
  app.add_flag("--cpu_util", options.cpu, "a column with this process's share of a core");
  app.add_flag("--data_validation", validation, "accepted; data is always verified");
  app.add_flag("--disable_pcie_relaxed", strict_order, "strict PCIe ordering");
  app.add_flag("--out_json", out_json,
               absl::StrFormat("perftest's report, every size, into %s", kJsonName));
  app.add_option("--out_json_file", out_json_file, "the same into a file of this name")
      ->check(engine::command_line::writable_file())
      ->type_name("FILE");
  app.add_option("--output", options.output, "print one number")
      ->check(one_of({"bandwidth", "message_rate", "latency"}));
  app.add_flag("--perform_warm_up", warm, "accepted; every size is warmed up");
  app.add_flag("--report_gbits", options.gbits, "Gb/sec instead of MiB/sec");
  app.add_flag("--run_infinitely", options.endless, "a row every -D seconds (default 5)");
  app.add_option("--use_cuda", options.cuda,
                 "memory of this CUDA device on this side; without an adapter that reaches it, "
                 "staged")
      ->check(whole_number(0, 1023))
      ->type_name("N");
  app.add_flag("--use_cuda_dmabuf", options.dma_buf,
               "with --use_cuda: fail unless the adapter reaches it (by dma-buf)");
  app.add_flag("--use_hugepages", options.huge_pages, "fail if there are no huge pages");
  app.add_flag("--write_with_imm", options.immediate, "a counter signals arrival");
  engine::command_line::add_provider(app, options.provider,
                                     "provider that moves the bytes (default verbs)");
  engine::command_line::add_settings(app, options.settings);
  app.add_option("--listen", options.listen, "address of the server (default: all)")
      ->check(engine::command_line::host())
      ->type_name("HOST");
  app.add_flag("--keep", options.keep, "serve one client after another, until Ctrl-C");
  app.add_flag("--once", once, "accepted; a server without --keep exits after one client");
  app.add_flag("--loopback", options.loopback, "both sides, on this machine");
  app.add_flag("--pin,!--no_pin", options.pin, "with --loopback: a core for each side (default)");
  app.add_flag("--cold", options.cold, "walk memory larger than the caches");
  app.add_flag("--no_verify", no_verify, "do not check the bytes that arrived");
  app.add_flag("--live", options.live, "a line every second, even if stderr is not a terminal");
  app.add_option("--json", options.json, "one JSON object per row")
      ->check(engine::command_line::writable_file())
      ->type_name("FILE");

  const auto refuse = [&](std::string_view what) {
    std::cerr << name << ": " << what << " (see " << name << " --help)\n";
    return PerfCommand{.options = std::nullopt, .exit_status = engine::command_line::kUsage};
  };
  engine::command_line::prepare(app, name);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == static_cast<int>(CLI::ExitCodes::Success)) {
      return {.options = std::nullopt, .exit_status = app.exit(error, std::cout, std::cerr)};
    }
    return refuse(engine::command_line::complaint(app, error));
  }
  if (const auto unknown = app.remaining(); !unknown.empty())
    return refuse(complaint(app, unknown));
  if (version) {
    std::cout << "Version: baton " << BATON_VERSION << "\n";
    return {.options = std::nullopt, .exit_status = 0};
  }
  const auto no_effect = [&](bool given, const char* flag, const char* instead) {
    if (!given) return;
    options.notes.push_back(absl::StrFormat("%s has no effect: %s", flag, instead));
  };
  no_effect(rdma_cm, "-R", "queue pairs are connected over TCP, as NCCL does");
  no_effect(by_cm, "-z", "addresses are exchanged over TCP, where both sides prove who they are");
  no_effect(histogram, "-H",
            "samples are not kept; --json FILE holds p50 to p99.9 and the maximum");
  no_effect(unsorted, "-U", "samples are not kept; --json FILE holds p50 to p99.9 and the maximum");
  no_effect(cycles, "-C", "times are in microseconds");
  no_effect(!counters.empty(), "-W", "`baton info` shows the counters of every port");
  if (options.loopback && !host.empty()) return refuse("--loopback takes no HOST");
  if (!host.empty() || !options.provider.empty()) {
    engine::command_line::tell_idle_settings(name, options.settings, {options.client_provider()});
  }

  // Flags become settings of providers, also of those that this program may have been built
  // without.
  const auto set = [&](std::string_view key, std::string value) {
    if (!check_provider(key.substr(0, key.find('.'))).ok()) return;
    options.settings.emplace_back(key, std::move(value));
  };
  // One, as perftest has it: a table says what ran, not what the provider likes best.
  set("tcp.sockets", absl::StrCat(options.streams));
  set("verbs.qps", absl::StrCat(options.streams));
  if (ib_port && options.device.empty() && *ib_port != 1) return refuse("-i needs -d DEV as well");
  if (dual_port) {
    if (options.device.empty() || ib_port ||
        options.device.find_first_of(",:") != std::string::npos) {
      return refuse("-O goes with one device, -d DEV, whose ports 1 and 2 it means");
    }
    options.device = absl::StrCat(options.device, ":1,", options.device, ":2");
    options.dual_port = true;
  }
  if (!options.device.empty()) set("verbs.devices", devices_with_port(options.device, ib_port));
  // One device on this side is one on the other, however many the server has.
  const auto devices = 1 + std::count(options.device.begin(), options.device.end(), ',');
  set("verbs.pairs", absl::StrCat(devices));
  if (options.gid_index) set("verbs.gid_index", absl::StrCat(*options.gid_index));
  if (options.mtu) set("verbs.mtu", absl::StrCat(*options.mtu));
  if (options.inline_size) set("verbs.inline_bytes", absl::StrCat(*options.inline_size));
  if (options.cq_mod) {
    options.notes.emplace_back("-Q has no effect: the provider chooses how often it signals");
  }
  if (options.outs) set("verbs.rd_atomic", absl::StrCat(*options.outs));
  for (size_t i = 0; i < kKnobs.size(); ++i) {
    if (knobs[i]) set(kKnobs[i].setting, absl::StrCat(*knobs[i]));
  }
  if (options.client_provider() != "verbs") {
    std::vector<std::string> idle;
    for (const char* flag : kOfQueuePairs) {
      if (app.get_option(flag)->count() > 0) idle.emplace_back(flag);
    }
    if (!idle.empty()) {
      options.notes.push_back(
          absl::StrFormat("%s %s no effect: there are queue pairs over verbs only",
                          absl::StrJoin(idle, " "), idle.size() > 1 ? "have" : "has"));
    }
  }
  if (receives->count() > 0) set("verbs.receive_depth", absl::StrCat(options.receives));
  if (strict_order) set("verbs.relaxed_ordering", "0");
  options.verify = !no_verify;
  options.peak = !no_peak;
  if (!out_json_file.empty()) {
    options.out_json = out_json_file;
  } else if (out_json) {
    options.out_json = kJsonName;
  }
  set_sizes(all, size, options);
  if (!host.empty()) {
    auto where = server_address(host, options.port);
    if (!where.ok()) return refuse(std::string(where.status().message()));
    options.host = *std::move(where);
  }
  const absl::Status status = finish(options, connection, margin->count() > 0);
  if (!status.ok()) return refuse(std::string(status.message()));
  return {.options = std::move(options), .exit_status = 0};
}

// Flags that perftest has and we do not, each with the nearest that we have.

namespace {

struct UnsupportedFlag {
  std::string_view flags;  // separated by blanks; a trailing * stands for any rest
  const char* instead;
};

constexpr std::array kUnsupported = {
    UnsupportedFlag{"-A --atomic_type", "there are no atomic tests; the nearest is write_lat"},
    UnsupportedFlag{"--report-histogrm", "use -H, which does the same"},
    UnsupportedFlag{"-g --mcg -M --MGID --connectionless",
                    "there is no multicast; the nearest is send_bw"},
    UnsupportedFlag{"-L --hop_limit", "there is no setting for it; the nearest is --tclass"},
    UnsupportedFlag{"--report-per-port",
                    "the two ports are one row; `baton info` shows the counters of each"},
    UnsupportedFlag{"-X --vector", "the nearest is -e, which sleeps on events"},
    UnsupportedFlag{"--force-link --dlid --pkey_index --flow_label",
                    "there is no setting for it; `baton info --settings` lists those there are"},
    UnsupportedFlag{"--dont_xchg_versions", "both sides must speak the same version"},
    UnsupportedFlag{"--ipv6 --ipv6-addr --raw_ipv6", "write the address itself as HOST: [fe80::1]"},
    UnsupportedFlag{"--bind_source_ip", "the nearest is -d, which chooses the device"},
    UnsupportedFlag{"--recv_post_list", "receives are posted in batches by the provider; see -r"},
    UnsupportedFlag{"--use_old_post_send --no_lock --use_ooo --no_enhanced_reorder --cqe_poll "
                    "--disable_dynamic_polling --use-srq --unsolicited_write --mr_per_qp --log_* "
                    "--congest_type "
                    "--tph_mem --cpu_id --ph",
                    "the provider chooses this by itself; leave it out"},
    UnsupportedFlag{"--send_with_imm", "the nearest is --write_with_imm"},
    UnsupportedFlag{"--odp --use-null-mr --mmap --mmap-offset --payload_file_path",
                    "memory comes from a registered pool; the nearest is --use_hugepages"},
    UnsupportedFlag{
        "--use_cuda_bus_id --cuda_mem_type --use_data_direct --gpu_touch --use_cuda_pcie_mapping",
        "the nearest is --use_cuda=N; `baton info` lists the devices"},
    UnsupportedFlag{"--use_rocm* --use_musa* --use_neuron* --use_hl --use_mlu* --use_opencl "
                    "--opencl_platform_id --use_ib_dm_dmabuf",
                    "there is host memory and CUDA's (--use_cuda=N)"},
    UnsupportedFlag{"--latency_gap --burst_size --typical_pkt_size --rate_limit --rate_limit_type "
                    "--rate_units",
                    "there is no rate limiter; the nearest is -t 1, one message at a time"},
    UnsupportedFlag{"--report-both", "the two directions are in --json FILE"},
    UnsupportedFlag{"--reversed", "run the client on the other side, or use read_bw"},
    UnsupportedFlag{"--wait_destroy", "leave it out"},
    UnsupportedFlag{"--pin_cores --numa_node --disable_numa",
                    "run it under `numactl` or `taskset`"},
    UnsupportedFlag{"--data_validation_debug",
                    "data are verified by default; --no_verify ends that"},
    UnsupportedFlag{
        "-B --source_mac -E --dest_mac -G --use_rss -J --dest_ip -j --source_ip -K "
        "--dest_port -k --source_port -Y --ethertype -Z --server -P --client -v --mac_fwd "
        "--vlan_en --vlan_pcp --flows --flows_burst --promiscuous --reply_every --sniffer "
        "--tcp --raw_mcast --remote_mac --local_mac --remote_ip --local_ip --remote_port "
        "--local_port",
        "there are no raw Ethernet tests; the nearest are send_bw and send_lat"},
    UnsupportedFlag{
        "--aes_xts --encrypt_on_tx --sig_before --aes_block_size --data_enc_keys_number "
        "--kek_path --credentials_path --data_enc_key_app_path --sig_offload",
        "there is no encryption or signature offload; leave it out"},
};

bool names(std::string_view flags, std::string_view flag) {
  while (!flags.empty()) {
    const size_t end = std::min(flags.find(' '), flags.size());
    std::string_view name = flags.substr(0, end);
    flags.remove_prefix(std::min(end + 1, flags.size()));
    if (name == flag) return true;
    if (name.back() != '*') continue;
    name.remove_suffix(1);
    if (flag.substr(0, name.size()) == name) return true;
  }
  return false;
}

}  // namespace

std::string instead_of(const std::string& flag) {
  const bool is_long = flag.size() > 2 && flag[1] == '-';
  const std::string name =
      is_long ? flag.substr(0, flag.find('=')) : flag.substr(0, std::min<size_t>(2, flag.size()));
  for (const UnsupportedFlag& foreign : kUnsupported) {
    if (names(foreign.flags, name)) return foreign.instead;
  }
  return "";
}

}  // namespace baton::bench
