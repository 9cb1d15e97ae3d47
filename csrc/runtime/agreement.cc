#include "runtime/agreement.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "base/check.h"

namespace ep {
namespace {

struct Entry {
  std::string name, value;

  static Entry of(const std::string& line) {
    const size_t end = std::min(line.find('='), line.size());
    return {line.substr(0, end), line.substr(std::min(end + 1, line.size()))};
  }
};

std::vector<std::string> lines_of(const std::string& text) {
  std::istringstream stream(text);
  std::vector<std::string> lines;
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

// Of "name=value, name=value".
std::vector<std::string> items_of(const std::string& values) {
  std::vector<std::string> items;
  for (size_t begin = 0, end = 0; end != std::string::npos; begin = end + 2) {
    end = values.find(", ", begin);
    items.push_back(values.substr(begin, end - begin));
  }
  return items;
}

// The first in which two lists differ; the last pair is empty where none does.
std::pair<Entry, Entry> first_difference(const std::vector<std::string>& mine, const std::vector<std::string>& theirs) {
  for (size_t i = 0; i < std::min(mine.size(), theirs.size()); i++) {
    if (mine[i] != theirs[i]) return {Entry::of(mine[i]), Entry::of(theirs[i])};
  }
  return {};
}

}  // namespace

void Agreement::compare(int rank, int other_rank, const std::string& other) const {
  const std::string text = text_.str();
  const std::vector<std::string> mine = lines_of(text), theirs = lines_of(other);
  for (size_t line = 0; line < mine.size(); line++) {
    Entry my_entry = Entry::of(mine[line]), their_entry{"", "nothing"};
    if (line < theirs.size()) their_entry = Entry::of(theirs[line]);
    if (line + 1 == first_explained_ || (my_entry.name == their_entry.name && my_entry.value == their_entry.value)) {
      continue;
    }
    if (line >= first_explained_ && theirs.size() >= first_explained_) {
      const size_t at = first_explained_ - 1;
      const auto [my_item, their_item] =
          first_difference(items_of(Entry::of(mine[at]).value), items_of(Entry::of(theirs[at]).value));
      if (!my_item.name.empty() && my_item.name == their_item.name) my_entry = my_item, their_entry = their_item;
    }
    raise(ErrorKind::kMismatch, "the ranks disagree about ", my_entry.name, ": rank ", rank, " has ", my_entry.value,
          ", rank ", other_rank, " has ", their_entry.value, line < first_asked_ ? "" : "; " + question_);
  }
  const bool is_cut = other.empty() || other.back() != '\n';
  if (mine.size() != theirs.size() || is_cut) {
    raise(ErrorKind::kMismatch, "the ranks disagree about what to compare: rank ", rank, " sent ", text.size(),
          " bytes, rank ", other_rank, " ", other.size());
  }
}

void Agreement::check(Bootstrap& bootstrap) const {
  const auto all = bootstrap.allgather(text_.str());
  for (size_t r = 0; r < all.size(); r++) compare(bootstrap.rank(), static_cast<int>(r), all[r]);
}

}  // namespace ep
