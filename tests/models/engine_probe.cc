// What the engine computes, for a script that compares it with other programs.
//
//   engine_probe logits DIRECTORY CHUNK < token ids   one line of logits for every token
//   engine_probe encode TOKENIZER_JSON < lines        each a JSON string: ids, and the text again
//   engine_probe chat DIRECTORY < lines               each a list of messages, as its template
//                                                     writes them
#include <cstdio>
#include <iostream>

#include "engine/files/json_fields.h"
#include "engine/tokenizer/chat_template.h"
#include "engine/tokenizer/tokenizer.h"
#include "tests/engine_model/model_rig.h"
#include "tests/std.h"

namespace baton::engine {
namespace {

int fail(const absl::Status& status) {
  std::cerr << status.message() << "\n";
  return 1;
}

int logits(const std::string& directory, size_t chunk) {
  auto checkpoint = load_checkpoint(directory);
  if (!checkpoint.ok()) return fail(checkpoint.status());
  const Tokens tokens{std::istream_iterator<int32_t>(std::cin), {}};
  Rig rig(*checkpoint, 2);
  const auto table = rig.take(tokens.size());
  // The prompt but for its last token in chunks, and each of these as a decode step would.
  for (size_t end = 1; end <= tokens.size(); ++end) {
    const Tokens prefix(tokens.begin(), tokens.begin() + long(end));
    const size_t first = end % chunk == 0 ? end - chunk : end - 1;
    const Logits row = rig.run({{std::span(prefix).subspan(first), int32_t(first), table, true}});
    for (const float value : row) std::printf("%.9g ", value);
    std::printf("\n");
  }
  return 0;
}

int encode(const std::string& path) {
  auto tokenizer = Tokenizer::load(path);
  if (!tokenizer.ok()) return fail(tokenizer.status());
  for (std::string line; std::getline(std::cin, line);) {
    const auto text = parse_json(line, "a line");
    if (!text.ok() || !text->is_string()) return fail(absl::InvalidArgumentError("no JSON string"));
    const auto ids = tokenizer->encode(text->get<std::string>());
    const nlohmann::json out = {ids, tokenizer->decode(ids)};
    std::cout << out.dump(-1, ' ', true, nlohmann::json::error_handler_t::replace) << "\n";
  }
  return 0;
}

int chat(const std::string& directory) {
  const auto loaded = load_chat_template(directory);
  if (!loaded.ok()) return fail(loaded.status());
  if (!loaded->has_value()) return fail(absl::NotFoundError("no chat template"));
  for (std::string line; std::getline(std::cin, line);) {
    const auto messages = nlohmann::ordered_json::parse(line, nullptr, false);
    const auto text = (*loaded)->render(messages);
    nlohmann::json out;
    out[text.ok() ? "text" : "error"] = text.ok() ? *text : std::string(text.status().message());
    std::cout << out.dump() << "\n";
  }
  return 0;
}

int run(int argc, char** argv) {
  const std::string_view what = argc > 1 ? argv[1] : "";
  if (what == "logits" && argc == 4) return logits(argv[2], std::stoul(argv[3]));
  if (what == "encode" && argc == 3) return encode(argv[2]);
  if (what == "chat" && argc == 3) return chat(argv[2]);
  std::cerr << "usage: engine_probe logits DIRECTORY CHUNK | encode TOKENIZER_JSON | chat "
               "DIRECTORY\n";
  return 2;
}

}  // namespace
}  // namespace baton::engine

int main(int argc, char** argv) { return baton::engine::run(argc, argv); }
