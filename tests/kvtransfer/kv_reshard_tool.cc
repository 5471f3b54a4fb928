// Executes plans for kv_reshard_test: reads cases from the standard input, moves the bytes, and
// writes what lies in the targets then. Knows nothing of what they should hold: the script, by
// numpy, does.
//
//   in:  length(4) case as JSON, then the bytes of all buffers: of each source, then of each target
//   out: length(8) {"moved": bytes, "counted": bytes} as JSON, then the bytes of the targets'
//   buffers
//
// A case: {"length": tokens, "turn": n, "first": token, "sources": [worker...], "targets": [...]},
// a worker: {"buffers": [bytes...], "groups": [{"layers", "blocks", "block_tokens", "window",
// "total_heads", "first_head", "heads", "first_block", "pages", "fields": [{"role", "dtype",
// "width", "strides": [block, token, head, element], "places": [[buffer, offset]...]}]}]}.
#include <nlohmann/json.hpp>

#include "kvtransfer/kv_plan.h"
#include "tests/std.h"

namespace {

using namespace baton;
using namespace baton::kvtransfer;
using nlohmann::json;

struct Side {
  KvLayout layout;
  std::vector<std::string> buffers;
  std::vector<std::vector<uint32_t>> pages;
  std::vector<uint64_t> first_block;
};

[[noreturn]] void die(const std::string& why) {
  std::fprintf(stderr, "kv_reshard_tool: %s\n", why.c_str());
  std::exit(1);
}

bool take(void* out, size_t bytes) { return std::fread(out, 1, bytes, stdin) == bytes; }

Side side_of(const json& worker) {
  Side side;
  for (const json& bytes : worker["buffers"])
    side.layout.buffers.push_back({bytes.get<uint64_t>()});
  for (const json& from : worker["groups"]) {
    KvGroup group;
    group.layers = from["layers"].get<std::vector<uint32_t>>();
    group.blocks = from["blocks"];
    group.block_tokens = from["block_tokens"];
    group.window = from["window"];
    group.total_heads = from["total_heads"];
    group.first_head = from["first_head"];
    group.heads = from["heads"];
    for (const json& f : from["fields"]) {
      KvField field;
      field.role = static_cast<KvRole>(f["role"].get<int>());
      field.dtype = static_cast<KvDtype>(f["dtype"].get<int>());
      field.width = f["width"];
      field.block_stride = f["strides"][0];
      field.token_stride = f["strides"][1];
      field.head_stride = f["strides"][2];
      field.element_stride = f["strides"][3];
      for (const json& place : f["places"]) field.places.push_back({place[0], place[1]});
      group.fields.push_back(std::move(field));
    }
    side.layout.groups.push_back(std::move(group));
    side.pages.push_back(from["pages"].get<std::vector<uint32_t>>());
    side.first_block.push_back(from["first_block"]);
  }
  return side;
}

struct Moved {
  uint64_t bytes = 0;
  uint64_t counted = 0;
};

absl::Status run_plan(const KvPlan& plan, const Side& source, Side& target, KvTokens tokens,
                      Moved& moved) {
  for (size_t p = 0; p < plan.parts().size(); ++p) {
    const KvPart& part = plan.parts()[p];
    const auto copy = [&](const KvMove& move) {
      const std::string& from = source.buffers[move.source_buffer];
      std::string& to = target.buffers[move.target_buffer];
      for (const absl::Status& status :
           {move.source.check(from.size(), "source"), move.target.check(to.size(), "target")}) {
        if (!status.ok()) return status;
      }
      TransferCursor cursor(move.source, move.target, 0, move.source.bytes());
      for (Piece piece; cursor.next(piece);) {
        std::memcpy(&to[piece.remote_offset], &from[piece.local_offset], piece.bytes);
        moved.bytes += piece.bytes;
      }
      moved.counted += move.counted_bytes;
      return absl::OkStatus();
    };
    const absl::Status status =
        plan.for_each_move(p, part.kept(tokens, tokens.end),
                           {source.first_block[part.source_group], source.pages[part.source_group]},
                           {target.first_block[part.target_group], target.pages[part.target_group]},
                           KvPlan::kAllLayers, copy);
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

}  // namespace

int main() {
  for (uint32_t length = 0; take(&length, sizeof length);) {
    std::string text(length, '\0');
    if (!take(text.data(), length)) die("truncated case");
    const json test = json::parse(text);
    std::vector<Side> sources, targets;
    for (const json& worker : test["sources"]) sources.push_back(side_of(worker));
    for (const json& worker : test["targets"]) targets.push_back(side_of(worker));
    for (auto* group : {&sources, &targets}) {
      for (Side& side : *group) {
        for (const KvBuffer& buffer : side.layout.buffers) {
          side.buffers.emplace_back(buffer.bytes, '\0');
          if (!take(side.buffers.back().data(), buffer.bytes)) die("truncated buffers");
        }
      }
    }
    const KvTokens tokens{test["first"].get<uint64_t>(), test["length"].get<uint64_t>()};
    const auto ranks = static_cast<uint32_t>(sources.size());
    Moved moved;
    for (Side& target : targets) {
      for (uint32_t rank = 0; rank < ranks; ++rank) {
        const auto plan = KvPlan::make(sources[rank].layout, target.layout,
                                       {ranks, rank, test["turn"].get<uint64_t>()});
        if (!plan.ok()) die(std::string(plan.status().message()));
        const absl::Status status = run_plan(*plan, sources[rank], target, tokens, moved);
        if (!status.ok()) die(std::string(status.message()));
      }
    }
    const std::string reply = json{{"moved", moved.bytes}, {"counted", moved.counted}}.dump();
    const uint64_t reply_bytes = reply.size();
    std::fwrite(&reply_bytes, sizeof reply_bytes, 1, stdout);
    std::fwrite(reply.data(), 1, reply.size(), stdout);
    for (const Side& target : targets) {
      for (const std::string& bytes : target.buffers)
        std::fwrite(bytes.data(), 1, bytes.size(), stdout);
    }
    std::fflush(stdout);
  }
  return 0;
}
