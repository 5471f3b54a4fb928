// perftest's table and JSON report, and the latency and bandwidth limits of the command line.
#include "bench/perftest/perf_output.h"

#include <arpa/inet.h>

#include <array>
#include <regex>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"

namespace baton::bench {
namespace {

using Verb = PerfTest::Verb;

// "RDMA_Write Bidirectional BW Test"
std::string title_of(const PerfOptions& options) {
  constexpr std::array kVerbs = {"RDMA_Write", "RDMA_Read", "Send"};
  return absl::StrCat(kVerbs[static_cast<size_t>(options.test.verb)],
                      options.bidirectional ? " Bidirectional" : "",
                      options.post_list > 1 ? " Post List" : "",
                      options.test.latency ? " Latency" : " BW", " Test");
}

// Only verbs has queue pairs; other providers print no line about them.
bool over_verbs(const PerfOptions& options) { return options.client_provider() == "verbs"; }

std::string or_auto(const std::optional<uint64_t>& value, const char* unit = "") {
  return value ? absl::StrCat(*value, unit) : "auto";
}
const char* on(bool yes) { return yes ? "ON" : "OFF"; }

bool has_setting(const PerfOptions& options, std::string_view key) {
  for (const auto& [name, value] : options.settings) {
    if (name == key) return true;
  }
  return false;
}

bool using_srq(const PerfOptions& options) {
  // The last one given holds.
  std::string given;
  for (const auto& [name, value] : options.settings) {
    if (name == "verbs.shared_receives") given = value;
  }
  return given != "0";
}

// As perftest writes an address: its bytes in decimal.
std::string gid_bytes(const std::string& text) {
  std::array<unsigned char, 16> raw{};
  raw[10] = raw[11] = 0xff;
  if (inet_pton(AF_INET, text.c_str(), &raw[12]) != 1)
    inet_pton(AF_INET6, text.c_str(), raw.data());
  return absl::StrJoin(raw, ":", [](std::string* out, unsigned char byte) {
    absl::StrAppendFormat(out, "%02d", byte);
  });
}

// " local address: LID ..." and " GID: ..." of every queue pair that the route names, then the
// remote ones; nothing of other providers.
std::string addresses_of(const std::string& route) {
  std::string out;
  for (const char* side : {"local", "remote"}) {
    const std::regex end(absl::StrCat(side, " (LID \\S+ QPN \\S+ PSN \\S+) GID ([0-9a-fA-F.:]+)"));
    for (std::sregex_iterator it(route.begin(), route.end(), end), none; it != none; ++it) {
      absl::StrAppend(&out, " ", side, " address: ", (*it)[1].str(),
                      "\n GID: ", gid_bytes((*it)[2].str()), "\n");
    }
  }
  return out;
}

std::string device_of(const PerfOptions& options) {
  const bool named = over_verbs(options) && !options.device.empty();
  return named ? options.device : options.client_provider();
}

}  // namespace

std::string rule() {
  std::string line(88, '-');
  line.back() = '\n';
  return line;
}

std::string header_text(const PerfOptions& options, const PerfHeader& header) {
  const bool lat = options.test.latency;
  std::string out = rule();
  absl::StrAppend(&out, std::string(20, ' '), title_of(options), "\n");
  if (options.events) absl::StrAppend(&out, " Test with events\n");
  absl::StrAppend(&out,
                  absl::StrFormat(" Dual-port       : %s\t\tDevice         : %s\n",
                                  on(options.dual_port), device_of(options)),
                  absl::StrFormat(" Number of qps   : %d\t\tTransport type : %s\n", options.streams,
                                  options.client_provider()));
  if (over_verbs(options)) {
    absl::StrAppend(
        &out,
        absl::StrFormat(" Connection type : RC\t\tUsing SRQ      : %s\n", on(using_srq(options))),
        absl::StrFormat(" PCIe relax order: %s\n",
                        on(!has_setting(options, "verbs.relaxed_ordering"))));
  }
  absl::StrAppend(&out, absl::StrFormat(" TX depth        : %d\n", lat ? 1 : options.depth));
  if (options.post_list > 1) {
    absl::StrAppend(&out, absl::StrFormat(" Post List       : %d\n", options.post_list));
  }
  if (over_verbs(options)) {
    if (!lat) absl::StrAppend(&out, " CQ Moderation   : auto\n");
    absl::StrAppend(&out, " Mtu             : ", or_auto(options.mtu, "[B]"), "\n");
    if (options.gid_index) {
      absl::StrAppend(&out, absl::StrFormat(" GID index       : %d\n", *options.gid_index));
    }
    if (options.test.verb != Verb::kRead) {
      absl::StrAppend(&out, " Max inline data : ", or_auto(options.inline_size, "[B]"), "\n");
    } else {
      absl::StrAppend(&out, " Outstand reads  : ", or_auto(options.outs), "\n");
    }
    absl::StrAppend(&out, " rdma_cm QPs\t : ", on(false), "\n");
  }
  absl::StrAppend(&out, " Data ex. method : Notifications\n", " Memory          : ", header.memory,
                  options.cold ? ", larger than the caches\n" : "\n",
                  " Route           : ", header.route, "\n");
  for (const std::string& note : options.notes)
    absl::StrAppend(&out, " Note            : ", note, "\n");
  absl::StrAppend(&out, rule());
  if (const std::string addresses = addresses_of(header.route); !addresses.empty()) {
    absl::StrAppend(&out, addresses, rule());
  }
  return out;
}

std::string column_text(const PerfOptions& options) {
  std::string out;
  if (options.test.latency) {
    out =
        " #bytes #iterations    t_min[usec]    t_max[usec]  t_typical[usec]    t_avg[usec]    "
        "t_stdev[usec]   99% percentile[usec]   99.9% percentile[usec] ";
  } else {
    const char* unit = options.gbits ? "Gb/sec" : "MiB/sec";
    out = absl::StrFormat(
        " #bytes     #iterations    BW peak[%s]    BW average[%s]   MsgRate[Mpps]", unit, unit);
  }
  return absl::StrCat(out, options.cpu ? "    CPU_Util[%]\n" : "\n");
}

std::string row_text(const PerfOptions& options, const PerfResult& result) {
  const Histogram& lat = result.latencies;
  std::string out;
  if (options.test.latency) {
    const auto us = [](Time t) { return static_cast<double>(t.count()) * 1e-3; };
    out = absl::StrFormat(
        " %-7d %d          %-7.2f        %-7.2f      %-7.2f  \t       %-7.2f     "
        "\t%-7.2f\t\t%-7.2f "
        "\t\t%-7.2f",
        result.size, result.iterations, us(lat.min()), us(lat.max()), lat.quantile_us(0.5),
        lat.mean_us(), lat.stdev_us(), lat.quantile_us(0.99), lat.quantile_us(0.999));
  } else {
    out =
        absl::StrFormat(" %-7d    %-10d       %-7.2f            %-7.2f\t\t     %-7.6f", result.size,
                        result.iterations, in_units(options, result.peak_bytes_per_s),
                        in_units(options, result.bytes_per_s), result.messages_per_s * 1e-6);
  }
  if (options.cpu) absl::StrAppend(&out, absl::StrFormat("\t    %-3.2f", result.cpu_percent));
  return absl::StrCat(out, "\n");
}

std::string single_text(const PerfOptions& options, const PerfResult& result) {
  if (options.output == "latency") return absl::StrFormat("%.2f\n", result.latencies.mean_us());
  if (options.output == "message_rate") {
    return absl::StrFormat("%.6f\n", result.messages_per_s * 1e-6);
  }
  return absl::StrFormat("%.6f\n", in_units(options, result.bytes_per_s));
}

double in_units(const PerfOptions& options, double bytes_per_s) {
  return options.gbits ? bytes_per_s * 8e-9 : bytes_per_s / (1 << 20);
}

absl::Status check_limits(const PerfOptions& options, const PerfResult& result) {
  const double bw = in_units(options, result.bytes_per_s);
  if (options.limit_bw && bw < *options.limit_bw) {
    return absl::FailedPreconditionError(
        absl::StrFormat("size %d: the bandwidth of %.2f %s is below the limit of %.2f (-w)",
                        result.size, bw, options.gbits ? "Gb/sec" : "MiB/sec", *options.limit_bw));
  }
  const double rate = result.messages_per_s * 1e-6;
  if (options.limit_msgrate && rate < *options.limit_msgrate) {
    return absl::FailedPreconditionError(
        absl::StrFormat("size %d: the message rate of %.6f Mpps is below the limit of %.6f (-y)",
                        result.size, rate, *options.limit_msgrate));
  }
  return absl::OkStatus();
}

Json perftest_json(const PerfOptions& options, const PerfHeader& header,
                   const std::vector<PerfResult>& results) {
  Json info = {{"test", absl::StrReplaceAll(title_of(options), {{" ", "_"}})},
               {"Dual_port", on(options.dual_port)},
               {"Device", device_of(options)},
               {"Number_of_qps", options.streams},
               {"Transport_type", options.client_provider()}};
  if (over_verbs(options)) {
    info["Connection_type"] = "RC";
    info["Using_SRQ"] = on(using_srq(options));
    info["PCIe_relax_order"] = on(!has_setting(options, "verbs.relaxed_ordering"));
  }
  info["TX_depth"] = options.test.latency ? 1 : options.depth;
  if (options.post_list > 1) info["Post_List"] = options.post_list;
  if (over_verbs(options)) {
    if (options.mtu) info["Mtu"] = *options.mtu;
    if (options.gid_index) info["GID_index"] = *options.gid_index;
    if (options.inline_size) info["Max_inline_data"] = *options.inline_size;
    if (options.outs) info["Outstand_reads"] = *options.outs;
    info["rdma_cm_QPs"] = on(false);
  }
  info["Data_ex_method"] = "Notifications";
  info["Memory"] = memory_kind(options.cuda);
  info["Route"] = header.route;
  info["BW_unit"] = options.gbits ? "Gb/sec" : "MiB/sec";
  Json rows = Json::array();
  for (const PerfResult& result : results) {
    Json row = {{"MsgSize", result.size}, {"n_iterations", result.iterations}};
    const Histogram& lat = result.latencies;
    if (options.test.latency) {
      row["t_min"] = static_cast<double>(lat.min().count()) * 1e-3;
      row["t_max"] = static_cast<double>(lat.max().count()) * 1e-3;
      row["t_typical"] = lat.quantile_us(0.5);
      row["t_avg"] = lat.mean_us();
      row["t_stdev"] = lat.stdev_us();
      row["percentile_99"] = lat.quantile_us(0.99);
      row["percentile_99.9"] = lat.quantile_us(0.999);
      row["percentile_99.99"] = lat.quantile_us(0.9999);
      row["tps_average"] = result.messages_per_s;
    } else {
      row["BW_peak"] = in_units(options, result.peak_bytes_per_s);
      row["BW_average"] = in_units(options, result.bytes_per_s);
      row["MsgRate"] = result.messages_per_s * 1e-6;
    }
    if (options.cpu) row["CPU_util"] = result.cpu_percent;
    if (result.verified) row["verified"] = *result.verified;
    rows.push_back(std::move(row));
  }
  return {{"test_info", std::move(info)},
          {"results", options.sizes.size() == 1 && rows.size() == 1 ? rows[0] : rows}};
}

Json row_json(const PerfOptions& options, const PerfHeader& header, const PerfResult& result) {
  Row row;
  row.bench = options.test.name();
  row.params = {{"provider", options.client_provider()},
                {"size", result.size},
                {"depth", options.test.latency ? 1 : options.depth},
                {"post_list", options.post_list},
                {"qps", options.streams},
                {"bidirectional", options.bidirectional},
                {"cold", options.cold},
                {"memory", header.memory},
                {"memory_kind", memory_kind(options.cuda)},
                {"path", result.path}};
  if (options.duration > 0) row.params["duration"] = options.duration;
  for (const auto& [key, value] : options.settings) row.params[key] = value;
  row.route = result.route;
  row.bytes = result.size;
  if (result.messages_per_s > 0) row.seconds = 1 / result.messages_per_s;
  if (result.latencies.count() > 0) row.latency_us = result.latencies.summary();
  row.cpu_percent = result.cpu_percent;
  row.verified = result.verified;
  Json out = row.to_json();
  out["iterations"] = result.iterations;
  if (!options.test.latency) {
    out["GB_per_s"] = result.bytes_per_s * 1e-9;
    if (result.peak_bytes_per_s > 0) out["GB_per_s_peak"] = result.peak_bytes_per_s * 1e-9;
  }
  if (result.other_bytes_per_s) out["GB_per_s_of_server"] = *result.other_bytes_per_s * 1e-9;
  out["messages_per_s"] = result.messages_per_s;
  if (result.latencies.count() > 0) {
    out["latency_us"]["min"] = static_cast<double>(result.latencies.min().count()) * 1e-3;
    out["latency_us"]["mean"] = result.latencies.mean_us();
    out["latency_us"]["stdev"] = result.latencies.stdev_us();
  }
  out["server_cpu_percent"] = result.server_cpu_percent;
  return out;
}

}  // namespace baton::bench
