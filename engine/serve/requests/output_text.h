// From output tokens to the text that a client sees: whole characters, nothing past a stop string.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "engine/tokenizer/tokenizer.h"

namespace baton::engine::serve {

// What has been given out after n tokens depends on those n tokens alone, so a stream can be
// resumed elsewhere without repeating or losing a character. Not thread-safe.
class OutputText {
 public:
  OutputText(const Tokenizer& tokenizer, std::vector<std::string> stop);

  // The text that `token` lets out; may be empty. Text that may be the start of a stop string is
  // held back. After stopped() the result is empty.
  std::string push(int32_t token);
  // What is still held back at the end of the stream.
  std::string finish();
  bool stopped() const { return stopped_; }

 private:
  std::string release(std::string_view piece);

  StreamDecoder decoder_;
  std::vector<std::string> stop_;
  std::string held_;
  bool stopped_ = false;
};

}  // namespace baton::engine::serve
